"""The train step: gradient, guard, optimizer."""
