# The distribution's kernel: the newest release of a series, the image that QEMU starts, and its
# modules.

# Prints the newest release of a series in the package lists, such as 6.12.117+deb12-amd64. The
# suffix excludes the cloud flavour, which has no rdma_rxe.
newest_release() {
    local series=${1//./\\.}
    apt_cache pkgnames linux- |
        sed -nE "s/^linux-(image|binary|binary-unsigned)-($series\\.[0-9]+\\+deb[0-9]+-$kernel_flavour)$/\\2/p" | sort -uV | tail -n1
}

has_package() { apt_cache show --no-all-versions "$1" >/dev/null 2>&1; }

# Prints the packages of a release: one with image and modules, or (newer) one of each.
packages_of_release() {
    local release=$1 image
    if has_package "linux-modules-$release"; then
        for image in "linux-binary-$release" "linux-binary-unsigned-$release"; do
            has_package "$image" && echo "$image linux-modules-$release" && return
        done
    fi
    echo "linux-image-$release"
}

# Sets kernel_release, and fills $cache/kernel/$kernel_release/{image,boot,lib/modules}.
prepare_kernel() {
    local series=$1 resolved=$cache/kernel/newest-$1-$kernel_flavour
    mkdir -p "$cache/kernel"
    packages_for guest
    if [[ $resolved -nt $fresh_after && -f $cache/kernel/$(<"$resolved")/image ]]; then
        kernel_release=$(<"$resolved")
        return
    fi
    kernel_release=$(newest_release "$series")
    if [[ -z $kernel_release && ${#apt_lists[@]} == 0 ]]; then
        use_lists_in_cache
        kernel_release=$(newest_release "$series")
    fi
    if [[ -z $kernel_release ]]; then
        [[ -f $resolved ]] || no_environment "no package of a $series kernel in the package lists"
        kernel_release=$(<"$resolved")
    fi
    local folder=$cache/kernel/$kernel_release
    if [[ ! -f $folder/image ]]; then
        local packages
        read -ra packages < <(packages_of_release "$kernel_release")
        say "downloading ${packages[*]}"
        rm -rf "$folder" "$folder.new"
        if ! download "$folder.new/debs" "${packages[@]}"; then
            [[ ${#apt_lists[@]} == 0 ]] && use_lists_in_cache
            download "$folder.new/debs" "${packages[@]}" ||
                no_environment "cannot download ${packages[*]}: $(grep -m1 '^E:' "$apt/download.log")"
        fi
        local package image
        for package in "$folder.new"/debs/*.deb; do
            dpkg-deb -x "$package" "$folder.new" || no_environment "cannot unpack $package"
        done
        dpkg-deb -f "$package" Version >"$folder.new/version"
        rm -rf "$folder.new/debs" "$folder.new/usr/share"
        # Packages may have the modules in /usr/lib if /lib is a link.
        [[ -d $folder.new/lib ]] || ln -s usr/lib "$folder.new/lib"
        image=$(find "$folder.new" -type f -name "vmlinuz*" | head -n1)
        [[ $image ]] || no_environment "no vmlinuz in ${packages[*]}"
        # An image for aarch64 is started as it is.
        if [[ $target == x86_64 ]]; then
            extract_vmlinux "$image" "$folder.new/image"
        else
            cp "$image" "$folder.new/image"
        fi
        mv "$folder.new" "$folder"
    fi
    echo "$kernel_release" >"$resolved"
}

# number_at FILE OFFSET BYTES: prints an unsigned little-endian number.
number_at() { od -An -v -t "u$3" -j "$2" -N "$3" "$1" | tr -d ' '; }

# Extracts the ELF image from a bzImage. The boot protocol (Documentation/arch/x86/boot.rst) has its
# place: payload_offset (0x248) from the end of the setup sectors (0x1f1, plus the boot sector), and
# payload_length (0x24c). QEMU starts the image by its PVH note. That saves the time in which a
# bzImage unpacks itself under emulation.
extract_vmlinux() {
    local image=$1 vmlinux=$2
    [[ $(od -An -c -j 514 -N 4 "$image" | tr -d ' ') == HdrS ]] || no_environment "$image is not a bzImage"
    local start length magic unpack
    start=$((($(number_at "$image" 497 1) + 1) * 512 + $(number_at "$image" 584 4)))
    length=$(number_at "$image" 588 4)
    magic=$(od -An -v -t x1 -j $start -N 4 "$image" | tr -d ' ')
    # Four bytes with the unpacked length follow the stream, except with gzip.
    case $magic in
    1f8b*) unpack="gzip -dc" ;;
    28b52ffd) unpack="zstd -dc" length=$((length - 4)) ;;
    fd377a58) unpack="xz -dc" length=$((length - 4)) ;;
    *) no_environment "$image has an unknown compression (it begins with $magic)" ;;
    esac
    dd if="$image" iflag=skip_bytes,count_bytes skip=$start count="$length" bs=1M status=none | tool $unpack >"$vmlinux.new"
    [[ $(od -An -c -j 1 -N 3 "$vmlinux.new" | tr -d ' ') == ELF ]] || no_environment "no ELF image came out of $image"
    mv "$vmlinux.new" "$vmlinux"
}

# Copies modules and their dependencies, unpacked, to a folder. Their names there sort in the order
# of loading. Built-in modules are left out, and so are missing ones that are named with a question
# mark. NAME=FILE before the names replaces the distribution's module of that name.
copy_modules() {
    local folder=$1
    shift
    local -A path_of=() copied=()
    local tree=$cache/kernel/$kernel_release/lib/modules/$kernel_release path name count=0
    while IFS= read -r path; do
        name=${path##*/}
        name=${name%%.ko*}
        path_of[${name//-/_}]=$path
    done < <(find "$tree/kernel" -name '*.ko*')
    while [[ ${1:-} == *=* ]]; do
        path_of[${1%%=*}]=${1#*=}
        shift
    done
    mkdir -p "$folder"
    for name; do
        local optional=''
        [[ $name == *\? ]] && optional=1
        name=${name%\?}
        copy_module "${name//-/_}"
    done
}

copy_module() {
    local name=$1 path depends dependency file
    [[ ${copied[$name]:-} ]] && return
    copied[$name]=1
    path=${path_of[$name]:-}
    if [[ -z $path ]]; then
        [[ $optional ]] && return
        tr - _ <"$tree/modules.builtin" | grep "/$name\.ko$" >/dev/null && return
        no_environment "kernel $kernel_release has no module $name"
    fi
    file=$folder/.$name
    case $path in
    *.xz) tool busybox unxz -c "$path" >"$file" ;;
    *.zst) tool zstd -dc "$path" >"$file" ;;
    *.gz) gzip -dc "$path" >"$file" ;;
    *) cp "$path" "$file" ;;
    esac
    depends=$(LC_ALL=C grep -azo '^depends=.*' "$file" | tr -d '\0') || no_environment "$path does not say what it depends on"
    depends=${depends#depends=}
    optional=''
    for dependency in ${depends//,/ }; do copy_module "${dependency//-/_}"; done
    printf -v count '%03d' $((10#$count + 1))
    mv "$file" "$folder/$count-$name.ko"
}
