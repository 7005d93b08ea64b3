# Names that depend on the guest's processor.

select_target() {
    case $target in
    x86_64)
        debian=amd64 kernel_flavour=amd64 qemu_package=qemu-system-x86
        console=ttyS0
        ;;
    aarch64)
        debian=arm64 kernel_flavour=arm64 qemu_package=qemu-system-arm
        console=ttyAMA0
        ;;
    *) wrong_usage "the targets are x86_64 and aarch64, not $target" ;;
    esac
    case $target/$pages in
    */4) ;;
    aarch64/16) kernel_flavour+=-16k ;;
    aarch64/64) ;;
    *) wrong_usage "the page sizes are 4, and for aarch64 16 and 64, not $pages" ;;
    esac
    multiarch=$target-linux-gnu
    qemu=qemu-system-$target
}

# Exports what cargo needs to build for the guest, if this machine has another processor. Emulation is
# slow, so code is optimised, and has no debug information, which the guest would have to read.
select_cross_build() {
    local upper=${target^^}
    cargo_target=()
    [[ $target != "$(uname -m)" ]] || return 0
    command -v "$multiarch-gcc" >/dev/null ||
        no_environment "no $multiarch-gcc on this machine: apt-get install gcc-${target/_/-}-linux-gnu"
    rustc --print target-libdir --target "$target-unknown-linux-gnu" >/dev/null 2>&1 &&
        [[ -d $(rustc --print target-libdir --target "$target-unknown-linux-gnu") ]] ||
        no_environment "no Rust library for $target: rustup target add $target-unknown-linux-gnu"
    export "CARGO_TARGET_${upper}_UNKNOWN_LINUX_GNU_LINKER=$multiarch-gcc" \
        CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_OPT_LEVEL=1
    cargo_target=(--target "$target-unknown-linux-gnu")
}
