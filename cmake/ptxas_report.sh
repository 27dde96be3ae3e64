#!/bin/sh
# ptxas_report.sh FOLDER NVCC ARGUMENT...: runs the compiler and writes ptxas's report of registers, spills and serialised wgmma to
# FOLDER/<path of the source below cuda/>.o.log, which tests/package/test_ptxas.py reads. Warnings and errors still reach the screen.
folder=$1
shift
object=unknown previous=
for argument; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
object=${object#*.dir/}
log=$folder/${object#cuda/}.log
mkdir -p "$(dirname "$log")"
"$@" >"$log" 2>&1
status=$?
grep -vE '^(ptxas info|[[:space:]]+[0-9]+ bytes stack frame|$)' "$log"
exit $status
