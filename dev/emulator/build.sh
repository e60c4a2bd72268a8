#!/usr/bin/env bash
# usage: build.sh fast|asan|race SOURCE.cu OUTPUT [compiler flags...]     compiles CUDA code for the emulator
# fast: blocks on all cores. asan: AddressSanitizer and UBSan in the program. race: dev/emulator/race.cpp.
# The program itself is hardly optimised: it runs for seconds, and compiles for longer.
# CXX: the compiler; asan and race need g++. The engine's object files are kept under build/emulator/.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mode=$1 source=$2 output=$3
shift 3 || { sed -n 2,5p "$0" >&2; exit 2; }
cxx=${CXX:-g++}
common="-std=c++17 -g -Wall -Wextra -Wno-unknown-pragmas -fno-strict-aliasing -frounding-math"
engine=-fopenmp link=-fopenmp
case $mode in
  fast) program="-Og -march=native -fopenmp" ;;
  asan) link="-fopenmp -fsanitize=address,undefined -fno-sanitize-recover=undefined" program="-Og $link" ;;
  # The calls that the thread sanitizer puts into the program are answered by race.cpp, not by its library.
  # Not -Og: there g++ leaves out the call before a store of a function's result.
  race) engine=-DEMU_RACE program="-O1 -fsanitize=thread -DEMU_RACE" link= ;;
  *) echo "error: build '$mode', expected fast, asan or race" >&2; exit 2 ;;
esac
cache=$here/../../build/emulator/$mode-$(basename "$cxx")
mkdir -p "$cache"
(
  flock 9
  for f in host engine runtime tensor gemm race; do
    newest=$(ls -t "$here"/*.h "$here/build.sh" "$here/$f.cpp" | head -1)
    if [ ! "$cache/$f.o" -nt "$newest" ]; then
      $cxx $common -O3 -march=native $engine -c "$here/$f.cpp" -o "$cache/$f.o.part"
      mv "$cache/$f.o.part" "$cache/$f.o"
    fi
  done
) 9> "$cache/lock"
$cxx -x c++ $common $program -I "$here" "$@" -c "$source" -o "$output.o"
$cxx "$output.o" "$cache"/*.o $link -pthread -o "$output"
rm "$output.o"
