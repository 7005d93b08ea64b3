# Distribution packages, which apt downloads and checks, and which are unpacked into the cache.
# Nothing is installed. The machine's apt configuration is read, never written.

# Packages of the guest's programs, and the libraries that tests are linked with.
guest_packages=(busybox-static libibverbs1 ibverbs-providers ibverbs-utils iproute2 libc6 libgcc-s1)
# Unpacked packages of this machine's architecture (tools), and of the guest's.
tools=$cache/tools
guest_files=$cache/guest-$debian

# packages_for machine|guest: selects the packages that the functions below look up and download.
# Those of the guest are of its architecture, and come with all dependencies, as for a machine on
# which nothing is installed.
packages_for() {
    apt=$cache/apt apt_options=() apt_lists=() apt_suite=''
    if [[ $1 == guest ]]; then
        apt=$cache/apt-$debian
        apt_options=(-o APT::Architecture="$debian" -o APT::Architectures="$debian" -o Dir::State::status="$apt/status")
    fi
    mkdir -p "$apt"
    : >"$apt/status"
}

# apt_lists has options that select apt's package lists. Without any, apt reads the machine's own.
# The lists in the cache are of the same archive, plus the suites with newer kernels.
apt_get() {
    apt-get -q -o Debug::NoLocking=true -o APT::Sandbox::User=root -o APT::Install-Recommends=false \
        -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" "${apt_options[@]}" "${apt_lists[@]}" "$@"
}

apt_cache() { apt-cache -o Dir::Cache="$apt" "${apt_options[@]}" "${apt_lists[@]}" "$@"; }

use_lists_in_cache() {
    local codename archive
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    local format='$(SITE) $(RELEASE) $(COMPONENT)'
    local configured
    configured=$(apt-get indextargets --format "$format" 'Created-By: Packages' 2>/dev/null |
        awk -v codename="$codename" 'index($2, codename) == 1' | sort -u)
    archive=$(awk -v codename="$codename" '$2 == codename { print $1; exit }' <<<"$configured")
    [[ $archive ]] || no_environment "apt has no source for Debian ${codename:-(no codename)}: configure one and run apt-get update"
    if [[ $apt_suite ]]; then
        echo "deb $archive $apt_suite main"
    else
        awk '{ print "deb", $0 }' <<<"$configured"
        printf 'deb %s %s main\n' "$archive" "$codename-backports" "$archive" trixie-backports
    fi | sort -u >"$apt/sources.list"
    mkdir -p "$apt/lists/partial"
    apt_lists=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$apt/lists")
    say "updating the package lists in the cache"
    apt_get update >"$apt/update.log" 2>&1 ||
        no_environment "apt-get update failed: $(grep -m1 '^[EW]:' "$apt/update.log")"
}

# Downloads packages into a folder, installed or not.
download() {
    local folder=$1
    shift
    mkdir -p "$folder"
    (cd "$folder" && apt_get download "$@") >"$apt/download.log" 2>&1
}

# Downloads packages and their dependencies, without those that the machine has installed.
download_closure() {
    mkdir -p "$apt/archives/partial"
    apt_get --yes --download-only install "$@" >"$apt/download.log" 2>&1
}

# unpack FOLDER PACKAGE...: fills the folder with the packages and their dependencies. Does nothing
# if that was done today.
unpack() {
    local folder=$1 package link there
    shift
    [[ $folder/.packages -nt $fresh_after && $(<"$folder/.packages") == "$*" ]] && return
    say "downloading $*"
    rm -rf "$apt/archives"
    if ! download_closure "$@"; then
        use_lists_in_cache
        if ! download_closure "$@"; then
            [[ -f $folder/.packages && $(<"$folder/.packages") == "$*" ]] && return
            no_environment "cannot download $*: $(grep -m1 '^E:' "$apt/download.log")"
        fi
    fi
    rm -rf "$folder.new"
    mkdir -p "$folder.new"
    for package in "$apt"/archives/*.deb; do
        # The machine may have all of them installed.
        [[ -e $package ]] || break
        dpkg-deb -x "$package" "$folder.new" || no_environment "cannot unpack $package"
    done
    # A library that the machine has is not downloaded. The link of its -dev package then names the
    # machine's file.
    for link in "$folder.new"/usr/lib/*/*.so; do
        [[ -L $link && ! -e $link ]] || continue
        there=$(dirname "/${link#"$folder.new/"}")/$(readlink "$link")
        [[ ! -e $there ]] || ln -sf "$there" "$link"
    done
    echo "$*" >"$folder.new/.packages"
    rm -rf "$folder" "$apt/archives" && mv "$folder.new" "$folder"
}

prepare_tools() {
    local packages=()
    command -v "$qemu" >/dev/null || packages+=("$qemu_package")
    command -v busybox >/dev/null || packages+=(busybox-static)
    command -v zstd >/dev/null || packages+=(zstd)
    packages_for machine
    ((${#packages[@]} == 0)) || unpack "$tools" "${packages[@]}"
    packages_for guest
    unpack "$guest_files" "${guest_packages[@]}"
}

# Unpacks the C library of Debian 13 for the guest. Its functions begin with `paciasp` or `bti c`,
# unlike those of Debian 12.
prepare_newer_libc() {
    newer_libc=$cache/debian13-$debian
    packages_for guest
    apt=$cache/apt-$debian-13 apt_suite=trixie
    apt_options+=(-o Dir::State::status="$apt/status")
    mkdir -p "$apt"
    : >"$apt/status"
    unpack "$newer_libc" libc6 libgcc-s1
}

# Unpacks perftest into a folder of its own: only measurements need it.
prepare_perftest() {
    perftest=$cache/perftest-$debian
    packages_for guest
    unpack "$perftest" perftest
}

# Runs a tool of the machine, or else the unpacked one with the unpacked libraries.
tool() {
    local name=$1 place
    shift
    if command -v "$name" >/dev/null; then
        command "$name" "$@"
        return
    fi
    for place in usr/bin bin usr/sbin sbin; do
        if [[ -x $tools/$place/$name ]]; then
            LD_LIBRARY_PATH=$(tool_libraries) "$tools/$place/$name" "$@"
            return
        fi
    done
    no_environment "no $name"
}

tool_libraries() { echo "$tools/usr/lib/$(uname -m)-linux-gnu:$tools/lib/$(uname -m)-linux-gnu"; }
