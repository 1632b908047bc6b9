"""Models of other libraries over the ops; each module needs its library only when it is called."""
