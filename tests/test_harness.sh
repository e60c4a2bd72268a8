#!/usr/bin/env bash
# test_harness.sh - the tests' own machinery: nothing that fails may end in a green line.
cd "$(dirname "$0")/.." || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
passed=0 failed=0

expect() {  # name, what came out, what should have
  if [ "$2" = "$3" ]; then echo "ok   $1"; passed=$((passed + 1))
  else echo "FAIL $1: got '$2', expected '$3'"; failed=$((failed + 1)); fi
}
# program NAME 'shell code': a stand-in for a test program
program() { printf '#!/usr/bin/env bash\n%s\n' "$2" > "$folder/$1"; chmod +x "$folder/$1"; }
run() { (cd "$folder" && bash "$OLDPWD/tests/run.sh" "$@" 2>&1); echo "status $?"; }
# The line of totals and the exit status.
end_of() { tail -n 2 <<< "$1" | paste -sd '|'; }
runs() { local name=$1 want=$2; shift 2; expect "$name" "$(end_of "$(run "$@")")" "$want"; }

program good 'echo "ok   a"; echo "ok   b"; echo "skip c: reason"; echo "2 passed, 0 failed, 1 skipped"'
program bad 'echo "ok   a"; echo "FAIL b: why"; echo "1 passed, 1 failed, 0 skipped"; exit 1'
program lenient 'echo "FAIL b: why"; echo "0 passed, 1 failed, 0 skipped"; exit 0'
program crash 'echo "ok   a"; kill -SEGV $$'
program silent 'exit 0'
program early 'echo "ok   a"; echo "ok   b"; exit 0'
program liar 'echo "1 passed, 0 failed, 0 skipped"; exit 3'
program script.sh 'echo "1 passed, 0 failed, 0 skipped"'
printf 'print("1 passed, 0 failed, 0 skipped")\n' > "$folder/script.py"

runs "all is well"                  "4 passed, 0 failed, 2 skipped|status 0" good good
runs "a failure fails the whole"    "3 passed, 1 failed, 1 skipped|status 1" bad good
runs "a failure with exit status 0" "2 passed, 1 failed, 1 skipped|status 1" lenient good
runs "a crash after a passed case"  "3 passed, 1 failed, 1 skipped|status 1" crash good
runs "a program that says nothing"  "2 passed, 1 failed, 1 skipped|status 1" silent good
runs "a program that ends half-way" "4 passed, 1 failed, 1 skipped|status 1" early good
runs "totals are fine, the status not" "3 passed, 1 failed, 1 skipped|status 1" liar good
runs "a program that is not there"  "2 passed, 1 failed, 1 skipped|status 1" gone good
runs "shell scripts"                "1 passed, 0 failed, 0 skipped|status 0" script.sh
if command -v python3 > /dev/null; then
  runs "Python scripts"               "1 passed, 0 failed, 0 skipped|status 0" script.py
fi
expect "the seconds of each program" "$(run good good | grep -c '^   [0-9]* s$')" 2
runs "nothing to run is an error"   "usage: tests/run.sh program...|status 2"

# check.h: one program with every way a case can end.
cat > "$folder/cases.cpp" << 'CPP'
#include "tests/check.h"
int main() {
  TEST("passes"); CHECK(true); CHECK_EQ(2, 2); CHECK_CLOSE(1.0, 1.1, 0.2);
  TEST("false"); CHECK(false);
  TEST("differs"); CHECK_EQ(2, 3); CHECK_EQ(4, 5);
  TEST("far"); CHECK_CLOSE(1.0, 1.1, 0.05);
  TEST("nan"); CHECK_CLOSE(NAN, NAN, 1e9);
  TEST("infinity"); CHECK_CLOSE(HUGE_VAL, HUGE_VAL, 1e9);
  TEST("nothing checked");
  TEST("skipped"); SKIP("reason");
  TEST("skipped, but failed before"); CHECK(false); SKIP("reason");
  return finish();
}
CPP
if ${CXX:-g++} -std=c++17 -I. "$folder/cases.cpp" -o "$folder/cases"; then
  output=$("$folder/cases"; echo "status $?")
  expect "check.h counts"            "$(end_of "$output")" "1 passed, 7 failed, 1 skipped|status 1"
  expect "check.h says what differs" \
         "$(grep -c 'FAIL differs: .*cases.cpp:5: 2: got 2, want 3 (and 1 more)' <<< "$output")" 1
  expect "check.h gives the reason"  "$(grep -c '^skip skipped: reason$' <<< "$output")" 1
else
  expect "check.h compiles" no yes
fi

# The Makefile: which GPU code it asks nvcc for. nvidia-smi prints its failures on stdout.
unset GPU_ARCH MAKEFLAGS MFLAGS MAKELEVEL
code() {  # name, what should come out, what nvidia-smi prints, its exit status, arguments of make
  program nvidia-smi "echo \"$3\"; exit $4"
  plan=$(PATH=$folder:$PATH make -n -W train_rdattnres.cu NVCC=nvcc train_rdattnres "${@:5}" 2>&1)
  expect "GPU code: $1" "$(grep -oE 'code=\S+|needs 8.0 or newer' <<< "$plan" | paste -sd ' ')" "$2"
}
any="code=[sm_80] code=[sm_90,compute_90]"
code "the card's, and its PTX"          "code=[sm_89,compute_89]" 8.9 0
code "the first of two cards"           "code=[sm_120,compute_120]" $'12.0\n9.0' 0
code "no card"                          "$any" "No devices were found" 6
code "no driver"                        "$any" "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." 9
code "a card that does not say"         "$any" "[N/A]" 0
code "GPU_ARCH, whatever the card is"   "code=[sm_90,compute_90]" 8.9 0 GPU_ARCH=90
code "GPU_ARCH with its own letter"     "code=[sm_90a,compute_90a]" 8.9 0 GPU_ARCH=90a
code "a card that is too old"           "needs 8.0 or newer" 7.5 0
code "GPU_ARCH that is too old"         "needs 8.0 or newer" 8.9 0 GPU_ARCH=75
code "GPU_ARCH with a dot"              "needs 8.0 or newer" 8.9 0 GPU_ARCH=9.0

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
