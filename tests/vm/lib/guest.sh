# The guest's file system, an initramfs with only the files that the run needs, and its boot.

# Copies an ELF file, and the libraries that it is linked with from the guest's packages.
copy_program() {
    mkdir -p "$(dirname "$2")"
    cp -L "$1" "$2"
    copy_libraries "$1"
}

copy_libraries() {
    local file=$1 library to found
    while IFS= read -r library; do
        to=$guest_root/lib/$multiarch/${library##*/}
        # The loader of programs has a fixed path.
        [[ $library != /* ]] || to=$guest_root$library
        [[ ! -e $to ]] || continue
        found=$(find_library "${library##*/}")
        [[ $found ]] || no_environment "$file needs ${library##*/}, which is missing"
        mkdir -p "${to%/*}"
        cp -L "$found" "$to"
        copy_libraries "$found"
    done < <(LC_ALL=C readelf -Wdl "$file" 2>/dev/null |
        sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p; s/.*program interpreter: (.*)\]/\1/p')
}

find_library() {
    local folder
    for folder in "$guest_files"/{lib,usr/lib}/"$multiarch" ${perftest:+"$perftest/usr/lib/$multiarch"} \
        ${libfabric_files:+"$libfabric_files/1.17/lib"}; do
        compgen -G "$folder/$1" || continue
        return
    done
}

# Prints the path of the first of these files that the unpacked packages have.
from_package() {
    local path
    for path; do
        [[ -e $guest_files/$path ]] && echo "$guest_files/$path" && return
    done
    no_environment "no package has ${1##*/}"
}

prepare_guest_root() {
    local libraries=usr/lib/$multiarch
    mkdir -p "$guest_root"/{bin,lib/"$multiarch",etc/libibverbs.d,"$libraries/libibverbs",tests,root}
    cp "$guest_files/bin/busybox" "$guest_root/bin/busybox"
    cp "$here/init" "$guest_root/init"
    copy_program "$(from_package bin/ip usr/bin/ip sbin/ip)" "$guest_root/bin/ip"
    copy_program "$(from_package usr/bin/rdma bin/rdma sbin/rdma)" "$guest_root/bin/rdma"
    copy_program "$(from_package usr/bin/ibv_devinfo)" "$guest_root/bin/ibv_devinfo"
    # Loaded by name at run time: no program is linked with them.
    copy_program "$(from_package $libraries/libibverbs.so.1)" "$guest_root/lib/$multiarch/libibverbs.so.1"
    copy_program "$(from_package $libraries/libibverbs/librxe-rdmav34.so $libraries/libibverbs/librxe-rdmav5*.so)" \
        "$guest_root/$libraries/libibverbs/librxe-rdmav34.so"
    cp "$(from_package etc/libibverbs.d/rxe.driver)" "$guest_root/etc/libibverbs.d/"
}

place_perftest() { copy_program "$perftest/usr/bin/ib_write_bw" "$guest_root/bin/ib_write_bw"; }

pack_guest_root() {
    (cd "$guest_root" && find . | LC_ALL=C sort | tool busybox cpio -o -H newc -R 0:0) >"$1" 2>"$work/cpio.log" ||
        no_environment "cannot pack the initramfs: $(tail -n1 "$work/cpio.log")"
}

# Starts QEMU. The output of the tests arrives at the file descriptor $results.
boot() {
    local limit=$1 command=("$qemu") processors=2 folder
    if ! command -v "$qemu" >/dev/null; then
        # The machine may have packages that QEMU's package shares with others, with its modules.
        local modules=usr/lib/$(uname -m)-linux-gnu/qemu
        [[ -d $tools/$modules ]] && modules=$tools/$modules || modules=/$modules
        command=(env "LD_LIBRARY_PATH=$(tool_libraries)" "QEMU_MODULE_DIR=$modules" "$tools/usr/bin/$qemu")
        for folder in "$tools"/usr/share/{qemu,seabios} /usr/share/{qemu,seabios}; do
            [[ ! -d $folder ]] || command+=(-L "$folder")
        done
    fi
    # With two processors, one that waits blocks the other until its time slice ends.
    [[ ! $bench$port ]] || processors=1
    command+=(-cpu max -smp "$processors" -m "$memory_mib" -nodefaults -no-user-config -display none -no-reboot
        -chardev "file,id=console,path=$work/console.log" -serial chardev:console
        -chardev "file,id=results,path=/dev/stdout" -device virtio-serial-pci
        -device "virtserialport,chardev=results"
        -kernel "$cache/kernel/$kernel_release/image" -initrd "$work/initramfs"
        -append "console=$console quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on")
    case $target in
    # Emulation in one thread gives the same results on every host, also in a nested machine.
    x86_64) command+=(-machine q35 -accel "tcg,thread=single") ;;
    # The workspace's tests take long, so each processor is emulated in a thread of its own. QEMU
    # allows that, since aarch64 promises a weaker order of memory accesses than the host.
    aarch64)
        command+=(-machine virt -accel "tcg,thread=$([[ $in_turns ]] && echo single || echo multi)"
            -cpu "max,pauth-impdef=on")
        ;;
    esac
    # The tests of the workspace and the files that they read.
    [[ ! $workspace ]] || command+=(
        -virtfs "local,path=$repository,mount_tag=repository,security_model=none,readonly=on"
        -virtfs "local,path=$cargo_folder,mount_tag=target,security_model=none,readonly=on")
    # The guest's clock then counts instructions, a nanosecond each, so that the load of this
    # machine changes neither the figures nor what meets the deadlines of another program.
    [[ ! $bench$port ]] || command+=(-icount "shift=0,sleep=off")
    exec {results}< <(exec timeout --foreground -k 5 "$limit" "${command[@]}" </dev/null 2>"$work/qemu.log")
    guest=$!
}
