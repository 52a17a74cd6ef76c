"""Pipeline parallelism: schedules as tables, and one executor for all of them."""
