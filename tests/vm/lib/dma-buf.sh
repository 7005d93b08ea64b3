# A modified rdma_rxe, built from the distribution's kernel source for the release that is booted.

# Sets dma_buf_built, a folder of this run's own with the results of rxe-dmabuf/build. The caller
# holds the lock of the cache.
prepare_dma_buf() {
    local program sum built
    for program in make gcc strip xz; do
        command -v $program >/dev/null || no_environment "--dma-buf needs $program on this machine"
    done
    sum=$(cat "$here"/rxe-dmabuf/* | sha256sum)
    built=$cache/dma-buf/$kernel_release-${sum:0:16}
    [[ -f $built/rdma_rxe.ko ]] || build_dma_buf "$built"
    # The copy is used without the lock, when another run may remove old drivers.
    dma_buf_built=$work/dma-buf
    cp -r "$built" "$dma_buf_built"
    touch "$built"
    find "$cache/dma-buf" -mindepth 1 -maxdepth 1 -name '*-????????????????' -mtime +30 -exec rm -rf {} +
}

build_dma_buf() {
    local built=$1 sources=$cache/dma-buf/$kernel_release
    [[ -d $sources ]] || unpack_kernel_sources "$sources"
    say "building rdma_rxe with dma-buf regions"
    rm -rf "$built" "$built.new"
    "$here/rxe-dmabuf/build" "$sources/rxe" "$sources/usr/src/linux-headers-$kernel_release" "$built.new" \
        >"$work/rxe-build.log" 2>&1 || {
        cat "$work/rxe-build.log" >&2
        no_environment "rdma_rxe does not build: $(grep -m1 -E 'error|\*\*\*|changed|not found' "$work/rxe-build.log")"
    }
    mv "$built.new" "$built"
}

kernel_source_packages() {
    local series version
    series=$(cut -d. -f1,2 <<<"$kernel_release")
    version=$(<"$cache/kernel/$kernel_release/version")
    echo "linux-source-$series=$version linux-headers-$kernel_release"
    apt_cache depends --no-recommends --no-suggests "linux-headers-$kernel_release" 2>/dev/null |
        awk '$1 == "Depends:" && $2 ~ /^linux-(headers-.*-common|kbuild-)/ { print $2 }'
}

# Unpacks the kernel headers, adapts their paths to the folder, and unpacks rxe's source.
unpack_kernel_sources() {
    local folder=$1 packages package archive
    mapfile -t packages < <(kernel_source_packages | tr ' ' '\n')
    if ((${#packages[@]} < 4)) && ((${#apt_lists[@]} == 0)); then
        use_lists_in_cache
        mapfile -t packages < <(kernel_source_packages | tr ' ' '\n')
    fi
    say "downloading ${packages[*]}"
    rm -rf "$folder.new"
    if ! download "$folder.new/debs" "${packages[@]}"; then
        ((${#apt_lists[@]})) || use_lists_in_cache
        download "$folder.new/debs" "${packages[@]}" ||
            no_environment "cannot download ${packages[*]}: $(grep -m1 '^E:' "$apt/download.log")"
    fi
    for package in "$folder.new"/debs/*.deb; do
        dpkg-deb -x "$package" "$folder.new" || no_environment "cannot unpack $package"
    done
    archive=$(compgen -G "$folder.new/usr/src/linux-source-*.tar.xz") || no_environment "no archive in ${packages[0]}"
    mkdir -p "$folder.new/rxe"
    tar -xJf "$archive" -C "$folder.new/rxe" --strip-components=5 --wildcards '*/drivers/infiniband/sw/rxe/*' ||
        no_environment "no rxe in $archive"
    sed -i "s#/usr/src/#$folder/usr/src/#" "$folder.new/usr/src/linux-headers-$kernel_release/Makefile"
    rm -rf "$folder.new/debs" "$archive"
    mv "$folder.new" "$folder"
}
