#!/usr/bin/env bash
# Whole runs of the CUDA trainer: test_run.cpp once more, or the test given as the argument, through the
# emulator (or with the trainer that CUDA_TRAINER names).
trainer=${CUDA_TRAINER:-build/train_emulated}
if [ ! -x "$trainer" ]; then
  echo "skip whole runs of the CUDA trainer: no $trainer"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
exec "${1:-build/test_run}" "$trainer"
