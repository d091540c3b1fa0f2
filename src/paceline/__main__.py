"""`python -m paceline` is `paceline`."""

from paceline.commands.main import main

if __name__ == "__main__":
    main()
