# The build tools of the crate sideway (tests/vm/sideway): cmake, and libclang with its headers.

prepare_sideway() {
    local packages=(cmake libclang1-14 libclang-common-14-dev) program
    for program in make gcc; do
        command -v $program >/dev/null || no_environment "--sideway needs $program on this machine"
    done
    sideway_tools=$cache/sideway
    packages_for machine
    unpack "$sideway_tools" "${packages[@]}"
}

# Sets the environment of one build. Tools that were not downloaded are the machine's own.
use_sideway_tools() {
    local folder headers
    for folder in "$sideway_tools/usr/lib/llvm-14/lib" /usr/lib/llvm-14/lib; do
        [[ -e $folder/libclang.so.1 ]] && export LIBCLANG_PATH=$folder && break
    done
    for folder in "$sideway_tools/usr/lib/llvm-14/lib" /usr/lib/llvm-14/lib; do
        headers=$(compgen -G "$folder/clang/*/include/stddef.h") || continue
        export BINDGEN_EXTRA_CLANG_ARGS="-isystem ${headers%/stddef.h}"
        break
    done
    export PATH=$sideway_tools/usr/bin:$PATH
    export LD_LIBRARY_PATH=$sideway_tools/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}
