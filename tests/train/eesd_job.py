"""train/eesd.py as one process of a launcher that may share the model out (see test_sharding.py)."""

from tests.train.sharded_job import adjust_launcher

if __name__ == "__main__":
    adjust_launcher()
    from train.eesd import main

    main()
