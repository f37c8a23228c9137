"""``python -m dppo_megatron``."""

from dppo_megatron.cli import main

if __name__ == "__main__":
    main()
