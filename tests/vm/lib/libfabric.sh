# Two releases of libfabric with their verbs provider, for the tests over `verbs;ofi_rxm`.

libfabric_releases=(1.17 2.5)

# Sets libfabric_files, the folder of tests/libfabric/fetch.
prepare_libfabric() {
    libfabric_files=$("$repository/tests/libfabric/fetch") || no_environment "no libfabric (above)"
}

# Places both releases in /libfabric of the guest.
place_libfabric() {
    local release plug_in folder=$guest_root/libfabric
    # The verbs provider looks the name up.
    echo '127.0.0.1 localhost' >"$guest_root/etc/hosts"
    for release in "${libfabric_releases[@]}"; do
        copy_program "$libfabric_files/$release/lib/libfabric.so.1" "$folder/$release/libfabric.so.1"
        for plug_in in "$libfabric_files/$release"/plug-ins/*; do
            [[ ! -e $plug_in ]] || copy_program "$plug_in" "$folder/$release/plug-ins/${plug_in##*/}"
        done
    done
}

# place_libfabric_tests BINARY NAME: places a test binary once for each release. The conformance
# suite runs with 1.17 alone: `ofi_rxm` of 2.5 uses the memory of a connection after it has freed
# it, which ends the process in some runs. rxe's completion queues are too short for 256 peers.
place_libfabric_tests() {
    local release name
    for release in "${libfabric_releases[@]}"; do
        [[ $2 != libfabric_conformance || $release == 1.17 ]] || continue
        name=libfabric-$release-$2
        place "$1" "$guest_root/tests/$name"
        { ((${#test_arguments[@]} == 0)) || printf '%s\n' "${test_arguments[@]}"; } \
            >"$guest_root/tests/$name.arguments"
        printf '%s\n' "$device_environment" "export HMEM_LIBFABRIC_LIBRARY=/libfabric/$release/libfabric.so.1" \
            "export FI_PROVIDER_PATH=/libfabric/$release/plug-ins FI_UNIVERSE_SIZE=16 FI_LOG_PROV=none" \
            >"$guest_root/tests/$name.environment"
        echo "$name" >>"$guest_root/tests/list"
    done
}
