#!/bin/sh
# ptxas_report.sh FOLDER NVCC ARGUMENT...: runs the compiler and keeps what ptxas says of registers, spills and serialised wgmma in
# FOLDER/<object>.log, where tests/test_ptxas.py reads it. Warnings and errors still reach the screen.
folder=$1
shift
object=unknown previous=
for argument; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
mkdir -p "$folder"
log=$folder/$(basename "$object").log
"$@" >"$log" 2>&1
status=$?
grep -vE '^(ptxas info|[[:space:]]+[0-9]+ bytes stack frame|$)' "$log"
exit $status
