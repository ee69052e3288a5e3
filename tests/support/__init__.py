"""What tests share: fakes, worlds, small models, and servers as processes."""
