"""The tests of ddpkit; a package, so that a started rank can import their functions by name."""
