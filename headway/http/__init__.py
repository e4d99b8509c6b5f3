"""The HTTP doors: the hot lane, the ordinary routes and the admin port."""
