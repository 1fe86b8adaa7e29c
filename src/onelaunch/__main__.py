from onelaunch.cli import main

if __name__ == "__main__":
    main()
