#!/bin/sh
# older_glibc.sh ARCHIVE COPY: copies a static library so that glibc 2.27 has every symbol that the copy needs; wheels then run on older
# systems. When a symbol gets a new version, glibc keeps the old one (2.34 moved threads into libc.so.6). But a linker takes the new version
# unless the name that it looks for contains the old one: pthread_create@GLIBC_2.2.5.
set -e
objdump -T "$("${CC:-cc}" -print-file-name=libc.so.6)" | awk '
    function number(version) { split(version, part, /[_.]/); return part[2] * 1e6 + part[3] * 1e3 + part[4] }
    !match($0, /\(?GLIBC_2[0-9.]*\)?/) { next }
    {
        name = $NF; version = substr($0, RSTART, RLENGTH)
        if (version !~ /^\(/) { if (number(version) > number("GLIBC_2.27")) newer[name] = 1; next } # the one that linkers take
        version = substr(version, 2, RLENGTH - 2)
        if (number(version) <= number("GLIBC_2.27") && number(version) > number(older[name])) older[name] = version
    }
    END { for (name in newer) if (name in older) print name, name "@" older[name] }' >"$2.names"
objcopy --redefine-syms="$2.names" "$1" "$2"
