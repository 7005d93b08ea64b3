# The test binaries: their list, their build, and the evaluation of their output.

mark="@@hmem-vm-$$-$RANDOM@@"

# Where cargo puts what it builds.
cargo_folder=${CARGO_TARGET_DIR:-$repository/target}

# Prints one line of arguments to `cargo test` (`cargo bench` with --bench) for each set of
# binaries. With the options --workspace and --package they run as on a machine without RDMA devices.
suite() {
    if [[ $chosen_packages ]]; then
        echo "$chosen_packages"
    elif [[ $workspace ]]; then
        echo "--workspace"
        echo "--manifest-path tests/allocators/Cargo.toml"
    fi
    if [[ $bench ]]; then
        echo "--package hmem-provider-verbs --bench verbs"
        echo "--package hmem-cli --bench perftest"
        return
    fi
    [[ ! $no_devices ]] || return 0
    if [[ $port ]]; then
        echo "$port"
        return
    fi
    if [[ $libfabric ]]; then
        echo "--package hmem-provider-libfabric --test libfabric_conformance --test endpoints"
        return
    fi
    [[ ! $dma_buf ]] || echo "--package hmem --test soak"
    ((soak == 0)) || return 0
    echo "--manifest-path tests/vm/smoke/Cargo.toml${dma_buf:+ --features dma-buf}"
    [[ ! $sideway ]] || echo "--manifest-path tests/vm/sideway/Cargo.toml"
    # One selection, so that nothing is built again. `system` has real memory with a genuine exporter
    # (/dev/udmabuf), and `command_verbs` and `perf_verbs` run the `hmem` command, which is built with
    # them.
    local file tests=(system cache_stale conformance vendor_dma_bufs command_verbs perf_verbs)
    for file in "$repository"/provider-verbs/tests/{*.rs,*/main.rs}; do
        file=${file%/main.rs}
        tests+=("$(basename "$file" .rs)")
    done
    [[ ! $c ]] || tests+=(domain_verbs)
    echo "--workspace ${tests[*]/#/--test=}"
}

# Builds the tests. Sets test_binaries, one line `RDMA<tab>FOLDER OF THE PACKAGE<tab>BINARY` each,
# where RDMA is `devices` for tests that need RDMA devices and else `none`, and programs, which the
# tests start.
build_tests() {
    local line arguments devices verb=test messages=$work/cargo.json
    [[ ! $bench ]] || verb=bench
    test_binaries=() programs=()
    while IFS= read -r line; do
        read -ra arguments <<<"$line"
        devices=devices
        [[ $line != --workspace && $line != "$chosen_packages" && $line != *allocators* ]] || devices=none
        say "building: cargo $verb ${arguments[*]}"
        (cd "$repository" && { [[ $line != *sideway* ]] || use_sideway_tools; } && { [[ ! $port ]] || use_port_files; } &&
            cargo $verb --quiet --no-run --message-format=json-render-diagnostics \
            --target-dir "$cargo_folder" "${cargo_target[@]}" "${arguments[@]}") >"$messages" ||
            { say "FAILED: the tests do not build"; exit 1; }
        while IFS= read -r line; do
            test_binaries+=("$devices"$'\t'"$line")
        done < <(sed -nE '/"kind":\["(bin|example)"\].*"test":false/d
            /"test":true\}/s/.*"manifest_path":"([^"]*)\/Cargo.toml".*"executable":"([^"]*)".*/\1\t\2/p' "$messages")
        while IFS= read -r line; do
            programs+=("$line")
        done < <(sed -n '/"kind":\["bin"\].*"test":false}/s/.*"executable":"\([^"]*\)".*/\1/p' "$messages")
    done < <(suite)
    ((${#test_binaries[@]})) || { say "FAILED: no test binaries"; exit 1; }
}

# place BINARY TO: copies a program and its libraries into the guest, without debug symbols. With
# --workspace the guest has the folder of the binaries.
place() {
    if [[ $workspace ]]; then
        copy_libraries "$1"
        ln -s "$1" "$2"
        return
    fi
    copy_program "$1" "$2"
    local strip=strip
    ((${#cargo_target[@]} == 0)) || strip=$multiarch-strip
    ! command -v $strip >/dev/null || $strip --strip-debug "$2"
}

# Prints the tests of a binary that skipped-$target.txt lists. Left out are tests whose reason does
# not hold in this run: that processors run in threads of their own, or that pages are larger.
skipped_tests() {
    local binary test reason
    [[ -f $here/skipped-$target.txt ]] || return 0
    while IFS='|' read -r binary test reason; do
        [[ ${binary// /} == "$1" ]] || continue
        [[ ! $in_turns || $reason != *"processors in threads of their own"* ]] || continue
        ((pages > 4)) || [[ $reason != *"larger pages"* ]] || continue
        echo "${test// /}"
    done < <(grep -v '^#' "$here/skipped-$target.txt")
}

# Environment of the tests that need RDMA devices.
device_environment='cd /tmp
export HMEM_TEST_CONFIG=verbs HMEM_VERBS_UNPLUG=1 HMEM_VERBS_DEVICE=rxe0 HMEM_VERBS_SECOND_DEVICE=rxe1'

# Sets listed, the number of tests that the list of skipped tests leaves out.
place_tests() {
    local binary devices folder name skipped
    listed=0
    mkdir -p "$guest_root/tests/programs"
    for binary in "${programs[@]}"; do
        [[ -e $guest_root/tests/programs/${binary##*/} ]] || place "$binary" "$guest_root/tests/programs/${binary##*/}"
    done
    : >"$guest_root/tests/list"
    for binary in "${test_binaries[@]}"; do
        IFS=$'\t' read -r devices folder binary <<<"$binary"
        # Removes the hash that cargo appends to the name.
        name=${binary##*/}
        name=${name%-*}
        if [[ $devices == none ]]; then
            folder=${folder#"$repository"}
            name=${folder#/}${folder:+-}$name
            name=${name//\//-}
            [[ ! -e $guest_root/tests/$name ]] || name+=-${binary##*-}
            [[ $name =~ ^($only)$ ]] || continue
            mapfile -t skipped < <(skipped_tests "$name")
            listed=$((listed + ${#skipped[@]}))
            {
                ((${#test_arguments[@]} == 0)) || printf '%s\n' "${test_arguments[@]}"
                ((${#skipped[@]} == 0)) || printf '%s\n' --exact "${skipped[@]/#/--skip=}"
            } >"$guest_root/tests/$name.arguments"
            printf '%s\n' "cd $(printf %q "$repository$folder")" "export CARGO_MANIFEST_DIR=$(printf %q "$repository$folder")" \
                >"$guest_root/tests/$name.environment"
        else
            grep -qx @devices "$guest_root/tests/list" || echo @devices >>"$guest_root/tests/list"
            if [[ $libfabric ]]; then
                place_libfabric_tests "$binary" "$name"
                continue
            fi
            [[ ! $workspace ]] || name=rdma-$name
            [[ ! -e $guest_root/tests/$name ]] || name=${binary##*/}
            {
                ((${#test_arguments[@]} == 0)) || printf '%s\n' "${test_arguments[@]}"
                [[ ${name#rdma-} != conformance || $filter ]] || echo verbs::
                [[ ${name#rdma-} != soak || $filter ]] || echo over_an_rdma_device
            } >"$guest_root/tests/$name.arguments"
            echo "$device_environment" >"$guest_root/tests/$name.environment"
        fi
        place "$binary" "$guest_root/tests/$name"
        echo "$name" >>"$guest_root/tests/list"
    done
    [[ ! ${newer_libc:-} ]] || place_newer_libc
    {
        # The kernel that the run built calls itself by the version alone.
        local release=$kernel_release
        ((pages != 64)) || release=${release%%-*}
        printf '%s=%q\n' mark "$mark" verbose "$keep" 'export HMEM_VM_KERNEL' "$release"
        # No packet goes between the two devices (README.md), and a program may connect any.
        [[ ! $port ]] || echo devices=1
        [[ ! $workspace ]] || printf '%s=%q\n' repository "$repository" target "$cargo_folder"
        [[ ! $dma_buf ]] || printf '%s\n' preload=/lib/ibv_reg_dmabuf_mr.so 'export HMEM_VERBS_DMA_BUF=1' \
            'export HMEM_VERBS_WINDOW_BOUNDS=1'
        ((soak == 0)) || printf '%s=%q\n' 'export HMEM_SOAK_SECONDS' $((60 * soak))
    } >"$guest_root/tests/environment"
}

# Places the tests of patched functions a second time, with the C library of Debian 13.
place_newer_libc() {
    local tests=iface-system-memhooks name=debian13-memhooks loader=ld-linux-aarch64.so.1
    [[ $name =~ ^($only)$ && -e $guest_root/tests/$tests ]] || return 0
    mkdir -p "$guest_root/debian13"
    cp -L "$newer_libc/usr/lib/$multiarch"/{"$loader",libc.so.6,libm.so.6,libgcc_s.so.1} "$guest_root/debian13/"
    cat >"$guest_root/tests/$name" <<SCRIPT
#!/bin/busybox sh
mount --bind /debian13 /lib/$multiarch && mount --bind /debian13/$loader /lib/$loader || exit 1
/tests/$tests "\$@"
status=\$?
umount /lib/$loader /lib/$multiarch
exit \$status
SCRIPT
    chmod +x "$guest_root/tests/$name"
    cp "$guest_root/tests/$tests.arguments" "$guest_root/tests/$name.arguments"
    cp "$guest_root/tests/$tests.environment" "$guest_root/tests/$name.environment"
    echo "$name" >>"$guest_root/tests/list"
    listed=$((listed + $(skipped_tests "$tests" | wc -l)))
}

# Prints the output of the tests, and counts their results in these variables.
ready='' running='' ended='' broken='' passed=0 failed=0 ignored=0 left_out=0 failures=()
read_results() {
    local line name status
    while IFS= read -r line <&"$results" || [[ $line ]]; do
        if [[ $line == "$mark "* ]]; then
            line=${line#"$mark "}
            case $line in
            ready) ready=$((SECONDS - booted)) ;;
            running\ *) running=${line#running } && printf '     Running %s (guest)\n' "$running" ;;
            ended\ *)
                read -r _ name status <<<"$line"
                running=''
                [[ $status == 0 ]] || failures+=("$name (status $status)")
                ;;
            broken\ *) broken=${line#broken } ;;
            end) ended=1 ;;
            esac
            continue
        fi
        printf '%s\n' "$line"
        if [[ $running == libfabric-* && $line =~ ^test\ .*\ \.\.\.\ ignored ]] &&
            ! grep -qEf <(grep -v '^#' "$repository/tests/libfabric/skipped.txt") <<<"$line"; then
            failures+=("$running (ignored for an unlisted reason: $line)")
        fi
        if [[ $line =~ ^test\ result:.*\ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored.*\ ([0-9]+)\ filtered ]]; then
            [[ $running == rdma-* ]] || left_out=$((left_out + BASH_REMATCH[4]))
            passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) ignored=$((ignored + BASH_REMATCH[3]))
        fi
    done
}

# Exits with the result of the run, and prints it in one line.
judge() {
    local reason='' kernel_says qemu_status=0
    wait "$guest" || qemu_status=$?
    guest=''
    kernel_says=$(grep -m1 -aE 'Kernel panic|BUG: |Oops|general protection fault' "$work/console.log" | tr -d '\r') || true

    if [[ $broken ]]; then
        reason="the guest could not be set up: $broken"
    elif [[ $kernel_says ]]; then
        reason="the guest's kernel: $kernel_says${running:+ (while running $running)}"
    elif [[ ! $ended ]]; then
        case $qemu_status in
        124 | 137) reason="the guest was not done after $time_limit s${running:+ (running $running)}" ;;
        0) reason="the guest stopped early${running:+ (running $running)}" ;;
        *) reason="QEMU ended with status $qemu_status: $(tail -n1 "$work/qemu.log")" ;;
        esac
    elif ((${#failures[@]})); then
        reason="in ${failures[*]}"
    elif [[ $workspace && ! ${test_arguments[*]} ]] && ((listed != left_out)); then
        reason="skipped-$target.txt lists $listed tests of these binaries, and $left_out of them exist"
    elif [[ ! $bench ]] && ((passed + failed == 0)); then
        reason="no test ran"
    fi
    if [[ $reason && ( $broken || $kernel_says || ! $ended ) && -s $work/console.log ]]; then
        say "the last lines of the guest's console:"
        tail -n 40 "$work/console.log" | tr -d '\r' >&2
    elif grep -qa 'WARNING: ' "$work/console.log"; then
        say "note: the guest's kernel warned: $(grep -m1 -a 'WARNING: ' "$work/console.log" | tr -d '\r')"
    fi
    local counts="$passed passed, $failed failed, $ignored ignored${workspace:+, $left_out left out} in $(grep -vcx @devices "$guest_root/tests/list") binaries"
    local times="guest ready after ${ready:-?} s, off after $((SECONDS - booted)) s; $((SECONDS - started)) s in all"
    if [[ $reason ]]; then
        say "FAILED on $kernel_release: $reason; $counts; $times"
        exit 1
    fi
    say "ok on $kernel_release: $counts; $times"
}
