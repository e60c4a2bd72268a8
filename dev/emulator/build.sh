#!/usr/bin/env bash
# usage: build.sh fast|asan|race SOURCE OUTPUT [compiler flags...]    compiles a .cu file for the CPU emulator
# fast: -O3, blocks on all cores. asan: AddressSanitizer + UBSan. race: data races, missing barriers, unwritten reads.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mode=$1 source=$2 output=$3; shift 3
cxx=${CXX:-g++}
flags="-std=c++17 -g -Wall -Wextra -Wno-unknown-pragmas -fno-strict-aliasing -I $here"
case $mode in
  fast) $cxx -x c++ $flags -O3 -march=native -fopenmp "$@" "$source" -o "$output" ;;
  asan) $cxx -x c++ $flags -O1 -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=undefined "$@" "$source" -o "$output" ;;
  race) # the sanitizer's calls are compiled in but its library is not linked: dev/emulator answers the calls itself
        $cxx -x c++ $flags -O1 -fsanitize=thread -DEMU_RACE "$@" -c "$source" -o "$output.o"
        $cxx "$output.o" -o "$output"; rm "$output.o" ;;
  *) echo "error: unknown build '$mode', expected fast, asan or race" >&2; exit 2 ;;
esac
