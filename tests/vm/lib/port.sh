# The tests of a program that the run was given (--port), and the files with which it builds: the
# build tools of `sideway.sh`, protoc, and libibverbs with its headers.

prepare_port() {
    port_files=$cache/port
    prepare_sideway
    packages_for machine
    unpack "$port_files" libibverbs-dev protobuf-compiler libprotobuf-dev
}

# Sets the environment of one build. Without debug information the guest's memory holds the tests.
use_port_files() {
    local libraries=$port_files/usr/lib/$multiarch
    use_sideway_tools
    export PKG_CONFIG_SYSROOT_DIR=$port_files PKG_CONFIG_PATH=$libraries/pkgconfig
    export PROTOC=$port_files/usr/bin/protoc PROTOC_INCLUDE=$port_files/usr/include
    export CPATH=${CPATH:+$CPATH:}$port_files/usr/include LIBRARY_PATH=$libraries
    export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$libraries
    export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_OPT_LEVEL=1
}
