# The C program c/examples/own_protection_domain.c, linked with the static C library.

prepare_c() {
    c_headers=$cache/libibverbs-dev
    command -v cc >/dev/null || no_environment "--c needs cc on this machine"
    packages_for machine
    unpack "$c_headers" libibverbs-dev
}

# Adds the program to those that the tests start.
build_c() {
    local folder=$work/c system
    say "building: c/examples/own_protection_domain.c"
    CARGO_TARGET_DIR=$cargo_folder "$repository/c/install" "$folder" --debug >&2 || exit 1
    read -ra system < <(sed -n 's/^Libs.private: //p' "$folder/lib/pkgconfig/hmem.pc")
    cc -std=c11 -isystem "$c_headers/usr/include" -I"$folder/include" \
        "$repository/c/examples/own_protection_domain.c" "$folder/lib/libhmem.a" \
        -L"$c_headers/usr/lib/x86_64-linux-gnu" -libverbs "${system[@]}" -Wl,--gc-sections \
        -Wl,--allow-shlib-undefined -o "$folder/own_protection_domain" ||
        { say "FAILED: the C program does not build"; exit 1; }
    programs+=("$folder/own_protection_domain")
}
