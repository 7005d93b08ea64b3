# The guest's file system, an initramfs with only the files that the run needs, and its boot.

# Copies an ELF file and the libraries that it is linked with.
copy_program() {
    local file=$1 to=$2 line library
    mkdir -p "$(dirname "$to")"
    cp -L "$file" "$to"
    while IFS= read -r line; do
        case $line in
        *"not found"*) no_environment "$file needs ${line%% =>*}, which is missing" ;;
        *" => /"*) library=${line#* => } ;;
        *ld-linux*) library=${line#"${line%%/*}"} ;;
        *) continue ;;
        esac
        library=${library%% *}
        case ${library##*/} in
        ld-linux*) line=$guest_root/lib64/${library##*/} ;;
        *) line=$guest_root/lib/x86_64-linux-gnu/${library##*/} ;;
        esac
        [[ -e $line ]] || cp -L "$library" "$line"
    done < <(LD_LIBRARY_PATH=$(unpacked_libraries) ldd "$file" 2>/dev/null)
}

# Prints the path of the first of these files that the unpacked packages have.
from_package() {
    local path
    for path; do
        [[ -e $unpacked/$path ]] && echo "$unpacked/$path" && return
    done
    no_environment "no package has ${1##*/}"
}

prepare_guest_root() {
    local libraries=usr/lib/x86_64-linux-gnu
    mkdir -p "$guest_root"/{bin,lib64,lib/x86_64-linux-gnu,etc/libibverbs.d,"$libraries/libibverbs",tests,root}
    cp "$unpacked/bin/busybox" "$guest_root/bin/busybox"
    cp "$here/init" "$guest_root/init"
    copy_program "$(from_package bin/ip usr/bin/ip sbin/ip)" "$guest_root/bin/ip"
    copy_program "$(from_package usr/bin/rdma bin/rdma sbin/rdma)" "$guest_root/bin/rdma"
    copy_program "$(from_package usr/bin/ibv_devinfo)" "$guest_root/bin/ibv_devinfo"
    # Loaded by name at run time: no program is linked with them.
    copy_program "$(from_package $libraries/libibverbs.so.1)" "$guest_root/lib/x86_64-linux-gnu/libibverbs.so.1"
    copy_program "$(from_package $libraries/libibverbs/librxe-rdmav34.so $libraries/libibverbs/librxe-rdmav5*.so)" \
        "$guest_root/$libraries/libibverbs/librxe-rdmav34.so"
    cp "$(from_package etc/libibverbs.d/rxe.driver)" "$guest_root/etc/libibverbs.d/"
}

place_perftest() { copy_program "$perftest/usr/bin/ib_write_bw" "$guest_root/bin/ib_write_bw"; }

pack_guest_root() {
    (cd "$guest_root" && find . | LC_ALL=C sort | busybox cpio -o -H newc -R 0:0) >"$1" 2>"$work/cpio.log" ||
        no_environment "cannot pack the initramfs: $(tail -n1 "$work/cpio.log")"
}

# Starts QEMU. The output of the tests arrives at the file descriptor $results.
boot() {
    local limit=$1 command=(qemu-system-x86_64) processors=2
    if ! command -v qemu-system-x86_64 >/dev/null; then
        command=(env "LD_LIBRARY_PATH=$(unpacked_libraries)" "$unpacked/usr/bin/qemu-system-x86_64"
            -L "$unpacked/usr/share/qemu" -L "$unpacked/usr/share/seabios")
    fi
    # With two processors, one that waits blocks the other until its time slice ends.
    [[ ! $bench ]] || processors=1
    # Plain emulation in one thread behaves alike everywhere, nested machines included.
    command+=(-machine q35 -accel "tcg,thread=single" -cpu max -smp "$processors" -m 2048
        -nodefaults -no-user-config -display none -no-reboot
        -chardev "file,id=console,path=$work/console.log" -serial chardev:console
        -chardev "stdio,id=results,signal=off" -serial chardev:results
        -kernel "$cache/kernel/$kernel_release/vmlinux" -initrd "$work/initramfs"
        -append "console=ttyS0 quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on")
    # The guest's clock then counts instructions, a nanosecond each, so that the load of this
    # machine does not change the figures.
    [[ ! $bench ]] || command+=(-icount "shift=0,sleep=off")
    exec {results}< <(exec timeout --foreground -k 5 "$limit" "${command[@]}" </dev/null 2>"$work/qemu.log")
    guest=$!
}
