# Functions of the vendor tier's scripts (tests/{cuda,rocr,ze,accelerators}/{fetch,run}), which
# source this file: downloads of pinned packages, and counted results.
#
# Exit status of the scripts: 0 passed, 1 failed, 3 something cannot be downloaded. In the last case
# a script still runs the parts that it can.

missing=0 failed=0 left_out=0

# Counts something that cannot be downloaded.
absent() {
    printf '%s: %s\n' "$(basename "$(dirname "$0")")/fetch" "$*" >&2
    missing=$((missing + 1))
}

# has_sum <file> <sha256>
has_sum() { sha256sum --check --status <<<"$2  $1" 2>/dev/null; }

# Unpacks Debian packages into a folder inside the cache. Nothing is installed.
# NAME=VERSION@SHA256 pins a package to a version and a checksum. A bare NAME selects the current
# version. Dependencies, such as the C library, are unpacked in the suites' current versions, unless
# alone=1. Afterwards the libraries and their dynamic loader are in
# FOLDER/usr/lib/x86_64-linux-gnu.
#
# unpack <folder> <component> <suites> <package>...
unpack() {
    local target=$1 component=$2 suites=$3 state package pin version there suite found=()
    state=$(dirname "$target")/apt/$(basename "$target")
    shift 3
    [[ $(cat "$target/complete" 2>/dev/null) == "$*" ]] && return
    rm -rf "$target" "$state/archives"
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    # The empty status file makes apt select all dependencies, as if nothing were installed.
    : >"$state/status"
    # The archive keys that the machine's own apt trusts have signed the lists.
    local mirror=${HMEM_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(SITE)' | grep -m1 '/debian/*$')}
    [[ $mirror ]] || { absent 'apt has no mirror of Debian: name one in HMEM_DEBIAN_MIRROR'; return; }
    for suite in $suites; do echo "deb $mirror $suite $component"; done >"$state/sources.list"
    local apt=(-q -o Debug::NoLocking=true -o APT::Sandbox::User=root -o APT::Architecture=amd64
        -o Dir::Cache="$state" -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=-
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null
        -o Dir::State::lists="$state/lists" -o Dir::State::status="$state/status")
    apt-get "${apt[@]}" update >"$state/log" 2>&1 ||
        { absent "no package lists of $suites ($state/log)"; return; }
    for pin in "$@"; do
        [[ $pin == *=* ]] || { found+=("$pin"); continue; }
        package=${pin%%=*} version=${pin#*=} version=${version%@*}
        there=$(apt-cache "${apt[@]}" madison "$package" | awk '{ print $3 }' | sort -u | paste -sd' ')
        if [[ " $there " != *" $version "* ]]; then
            absent "$package $version is not in $suites, which has ${there:-none}: change version and checksum in $0"
            return
        fi
        found+=("$package=$version")
    done
    if [[ ${alone:-} ]]; then
        (cd "$state/archives" && apt-get "${apt[@]}" download "${found[@]}")
    else
        apt-get "${apt[@]}" install -y --download-only --no-install-recommends "${found[@]}"
    fi >>"$state/log" 2>&1 || { absent "cannot download ${found[*]} ($state/log)"; return; }
    for pin in "$@"; do
        [[ $pin == *=* ]] || continue
        package=${pin%%=*} version=${pin#*=} version=${version%@*}
        has_sum "$(echo "$state/archives/${package}_${version//:/%3a}"_*.deb)" "${pin##*@}" ||
            { absent "$package $version has another checksum than $0 says"; return; }
    done
    for package in "$state"/archives/*.deb; do
        dpkg-deb -x "$package" "$target" || { absent "cannot unpack $package"; return; }
    done
    rm -rf "$state/archives"
    # Older suites have the C library there.
    if [[ -d $target/lib/x86_64-linux-gnu && ! -L $target/lib ]]; then
        cp -a "$target"/lib/x86_64-linux-gnu/. "$target/usr/lib/x86_64-linux-gnu/"
    fi
    echo "$*" >"$target/complete"
}

# Runs a fetch script. Sets cache to the folder that the script prints, and missing to a number
# other than 0 if something cannot be downloaded.
fetched() { # fetched <script>
    cache=$("$1")
    missing=$?
}

# Runs a command with the C library of an unpacked folder, which is newer than the machine's. Test
# binaries that cargo starts use that C library too.
under() { # under <folder> <command>...
    local libraries=$1/usr/lib/x86_64-linux-gnu
    shift
    env CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$libraries/ld-linux-x86-64.so.2 --library-path $libraries" "$@"
}

# Counts suites that cannot run here.
leave_out() { # leave_out <label>
    printf 'left out: %s\n' "$1" >&2
    left_out=$((left_out + 1))
}

# Runs tests. A test that is ignored for a reason that the pattern does not match is a failure, and
# so is a run in which no test passes.
passed() { # passed <label> <pattern of reasons> <command>...
    local label=$1 reasons=$2 output other status=0
    shift 2
    output=$("$@" 2>&1) || status=$?
    other=$(grep -E '^test .* \.\.\. ignored' <<<"$output" | grep -vE "$reasons")
    if ((status)) || [[ $other ]] || ! grep -qE '^test result: ok\. [1-9]' <<<"$output"; then
        printf '%s\n' "$output"
        [[ ! $other ]] || sed 's/^/ignored for another reason: /' <<<"$other"
        printf 'FAILED: %s\n' "$label"
        failed=$((failed + 1))
    else
        grep -E '^test (result:|.* \.\.\. ignored)' <<<"$output" | sed "s/^/$label: /" | cut -c1-200
    fi
}

# Prints the counts and ends the script. If the named variable is 1, left-out parts are no failure.
finish() { # finish <name> <variable>
    printf '%s: %s failed, %s left out\n' "$1" "$failed" "$left_out"
    ((failed == 0)) || exit 1
    ((missing || left_out)) || exit 0
    [[ ${!2:-} != 1 ]] || exit 0
    printf '%s: something cannot be downloaded (above); %s=1 leaves it out\n' "$1" "$2" >&2
    exit 3
}
