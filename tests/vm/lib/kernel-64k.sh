# A kernel for aarch64 with pages of 64 KiB, built from the distribution's source: the distribution
# has no such kernel.

# Sets kernel_release, and fills $cache/kernel/$kernel_release/image. The kernel is built only if the
# cache has none of the newest source with the present configuration.
build_kernel_64k() {
    local series=$1 program version sum folder tree
    packages_for guest
    version=$(source_version "$series")
    if [[ -z $version ]]; then
        use_lists_in_cache
        version=$(source_version "$series")
    fi
    [[ $version ]] || no_environment "no package linux-source-$series"
    sum=$(sha256sum <"$here/kernel-64k/config")
    kernel_release=$version-64k-${sum:0:8}
    folder=$cache/kernel/$kernel_release
    [[ ! -f $folder/image ]] || return 0
    for program in make gcc "$multiarch-gcc" flex bison bc xz perl; do
        command -v "$program" >/dev/null || no_environment "--pages 64 builds a kernel, which needs $program on this machine"
    done
    say "downloading linux-source-$series $version"
    rm -rf "$cache"/kernel/*-64k-*.new
    download "$folder.new" "linux-source-$series=$version" ||
        no_environment "cannot download linux-source-$series: $(grep -m1 '^E:' "$apt/download.log")"
    dpkg-deb --fsys-tarfile "$folder.new"/*.deb | tar -xO --wildcards "*/linux-source-$series.tar.xz" |
        tar -xJ -C "$folder.new" || no_environment "cannot unpack linux-source-$series"
    tree=$folder.new/linux-source-$series
    say "building a kernel with pages of 64 KiB"
    (
        cd "$tree"
        export ARCH=arm64 CROSS_COMPILE=$multiarch-
        make KCONFIG_ALLCONFIG="$here/kernel-64k/config" allnoconfig
        # An option that Kconfig left out would show only as a skipped test.
        missing=$(grep '^CONFIG_' "$here/kernel-64k/config" | grep -vxFf .config | tr '\n' ' ')
        [[ ! $missing ]] || { echo "error: not in .config: $missing"; exit 1; }
        make -j"$(nproc)" Image
    ) >"$work/kernel-build.log" 2>&1 || {
        tail -n 40 "$work/kernel-build.log" >&2
        no_environment "the kernel does not build: $(grep -m1 -E 'error|\*\*\*|not found' "$work/kernel-build.log")"
    }
    mv "$tree/arch/arm64/boot/Image" "$folder.new/image"
    rm -rf "$tree" "$folder.new"/*.deb
    rm -rf "$folder" && mv "$folder.new" "$folder"
}

source_version() {
    apt_cache policy "linux-source-$1" 2>/dev/null | sed -n 's/^ *Candidate: //p' | grep -v none || true
}
