# Distribution packages, which apt downloads and checks, and which are unpacked into the cache.
# Nothing is installed. The machine's apt configuration is read, never written.

# Packages of the guest's programs.
guest_packages=(busybox-static libibverbs1 ibverbs-providers ibverbs-utils iproute2)
unpacked=$cache/root

# Options that select apt's package lists. Without any, apt reads the machine's own. The lists in
# the cache are of the same archive, plus the suites with newer kernels.
apt_lists=()

apt_get() {
    apt-get -q -o Debug::NoLocking=true -o APT::Sandbox::User=root -o APT::Install-Recommends=false \
        -o Dir::Cache="$cache/apt" -o Dir::Cache::archives="$cache/apt/archives" "${apt_lists[@]}" "$@"
}

apt_cache() { apt-cache -o Dir::Cache="$cache/apt" "${apt_lists[@]}" "$@"; }

use_lists_in_cache() {
    local codename archive
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    local format='$(SITE) $(RELEASE) $(COMPONENT)'
    local configured
    configured=$(apt-get indextargets --format "$format" 'Created-By: Packages' 2>/dev/null |
        awk -v codename="$codename" 'index($2, codename) == 1' | sort -u)
    archive=$(awk -v codename="$codename" '$2 == codename { print $1; exit }' <<<"$configured")
    [[ $archive ]] || no_environment "apt has no source for Debian ${codename:-(no codename)}: configure one and run apt-get update"
    {
        awk '{ print "deb", $0 }' <<<"$configured"
        printf 'deb %s %s main\n' "$archive" "$codename-backports" "$archive" trixie-backports
    } | sort -u >"$cache/apt/sources.list"
    mkdir -p "$cache/apt/lists/partial"
    apt_lists=(-o Dir::Etc::sourcelist="$cache/apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$cache/apt/lists")
    say "updating the package lists in the cache"
    apt_get update >"$cache/apt/update.log" 2>&1 ||
        no_environment "apt-get update failed: $(grep -m1 '^[EW]:' "$cache/apt/update.log")"
}

# Downloads packages into a folder, installed or not.
download() {
    local folder=$1
    shift
    mkdir -p "$folder"
    (cd "$folder" && apt_get download "$@") >"$cache/apt/download.log" 2>&1
}

# Downloads packages and their dependencies, without those that the machine has installed.
download_closure() {
    mkdir -p "$cache/apt/archives/partial"
    apt_get --yes --download-only install "$@" >"$cache/apt/download.log" 2>&1
}

download_tools() {
    rm -rf "$cache/apt/archives"
    download_closure "$@" && download "$cache/apt/archives" "${guest_packages[@]}"
}

prepare_tools() {
    local packages=("${guest_packages[@]}") package
    command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
    command -v zstd >/dev/null || packages+=(zstd)
    [[ $unpacked/.packages -nt $fresh_after && $(<"$unpacked/.packages") == "${packages[*]}" ]] && return

    say "downloading ${packages[*]}"
    if ! download_tools "${packages[@]}"; then
        use_lists_in_cache
        if ! download_tools "${packages[@]}"; then
            [[ -f $unpacked/.packages && $(<"$unpacked/.packages") == "${packages[*]}" ]] && return
            no_environment "cannot download ${packages[*]}: $(grep -m1 '^E:' "$cache/apt/download.log")"
        fi
    fi
    rm -rf "$unpacked.new"
    mkdir -p "$unpacked.new"
    for package in "$cache"/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$unpacked.new" || no_environment "cannot unpack $package"
    done
    echo "${packages[*]}" >"$unpacked.new/.packages"
    rm -rf "$unpacked" && mv "$unpacked.new" "$unpacked"
    rm -rf "$cache/apt/archives"
}

# Unpacks perftest and its libraries into a folder of their own: only measurements need them.
prepare_perftest() {
    local packages=(perftest libibumad3 librdmacm1 libpci3 zlib1g libudev1) package
    perftest=$cache/perftest
    [[ -d $perftest ]] && return
    say "downloading ${packages[*]}"
    if ! download "$cache/apt/perftest" "${packages[@]}"; then
        use_lists_in_cache
        download "$cache/apt/perftest" "${packages[@]}" ||
            no_environment "cannot download ${packages[*]}: $(grep -m1 '^E:' "$cache/apt/download.log")"
    fi
    mkdir -p "$perftest.new"
    for package in "$cache"/apt/perftest/*.deb; do
        dpkg-deb -x "$package" "$perftest.new" || no_environment "cannot unpack $package"
    done
    rm -rf "$cache/apt/perftest"
    mv "$perftest.new" "$perftest"
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
        if [[ -x $unpacked/$place/$name ]]; then
            LD_LIBRARY_PATH=$(unpacked_libraries) "$unpacked/$place/$name" "$@"
            return
        fi
    done
    no_environment "no $name"
}

unpacked_libraries() {
    local folder
    for folder in "$unpacked" ${perftest:+"$perftest"}; do
        printf '%s:' "$folder/usr/lib/x86_64-linux-gnu" "$folder/lib/x86_64-linux-gnu"
    done
}

busybox() { "$unpacked/bin/busybox" "$@"; }
