#!/usr/bin/env bash
# The CUDA trainer killed, stopped twice, without a disk: test_crash.cpp once more; see test_cuda_run.sh.
exec bash "$(dirname "$0")/test_cuda_run.sh" build/test_crash
