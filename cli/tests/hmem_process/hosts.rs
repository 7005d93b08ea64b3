//! Two network namespaces with an Ethernet link between them, as two hosts have.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdin, Command, Stdio},
};

use super::{hmem, text};

/// Makes the namespaces, prints the process of the second, and removes both at the end of stdin. A
/// user namespace has the rights that this takes.
const SCRIPT: &str = r#"
set -e
unshare -n sleep 3600 >/dev/null &
other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add left type veth peer name right netns $other
ip addr add 10.77.0.1/24 dev left
ip link set left up
nsenter -t $other -n sh -ec 'ip addr add 10.77.0.2/24 dev right; ip link set right up'
until ip -o link show left | grep -q 'state UP'; do sleep 0.01; done
until nsenter -t $other -n ip -o link show right | grep -q 'state UP'; do sleep 0.01; done
echo $other
read -r _ || true
"#;

/// The namespaces. Dropping this value removes them.
pub(crate) struct Hosts {
    holder: Child,
    stdin: Option<ChildStdin>,
    right: u32,
}

/// One of the two namespaces.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Host {
    /// The namespace with the interface `left` and the address 10.77.0.1.
    Left,
    /// The namespace with the interface `right` and the address 10.77.0.2.
    Right,
}

impl Hosts {
    /// Makes the namespaces.
    ///
    /// # Errors
    /// The reason in words if this machine does not allow it.
    pub(crate) fn new() -> Result<Self, String> {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", SCRIPT]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |why: &str| format!("two network namespaces cannot be made: {}", why.trim());
        let mut holder =
            command.spawn().map_err(|error| failed(&format!("unshare (util-linux): {error}")))?;
        let stdin = holder.stdin.take();
        let mut line = String::new();
        let stdout = holder.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("UTF-8");
        let mut hosts = Self { holder, stdin, right: 0 };
        match line.trim().parse() {
            Ok(right) => hosts.right = right,
            Err(_) => {
                let mut why = String::new();
                hosts
                    .holder
                    .stderr
                    .take()
                    .expect("a pipe")
                    .read_to_string(&mut why)
                    .expect("UTF-8");
                return Err(failed(&why));
            }
        }
        Ok(hosts)
    }

    /// Returns `hmem` as a command of one host.
    pub(crate) fn hmem(&self, host: Host, subcommand: &str, arguments: &[&str]) -> Command {
        self.enter(host, &hmem(subcommand, arguments))
    }

    /// Returns the number of bytes that the interface of a host has received.
    pub(crate) fn received(&self, host: Host) -> u64 {
        let mut read = Command::new("cat");
        let output = self.enter(host, read.arg("/proc/net/dev")).output().expect("cat runs");
        let lines = text(&output.stdout).lines().map(str::trim);
        let mut counts =
            lines.filter_map(|line| line.strip_prefix("left:").or(line.strip_prefix("right:")));
        let bytes = counts.next().and_then(|counts| counts.split_whitespace().next()?.parse().ok());
        bytes.expect("the interface counts bytes")
    }

    /// Returns the same command in the namespace of a host.
    fn enter(&self, host: Host, command: &Command) -> Command {
        let process = match host {
            Host::Left => self.holder.id(),
            Host::Right => self.right,
        };
        let mut entered = Command::new("nsenter");
        entered.args(["--user", "--preserve-credentials", "--net", "--target"]);
        entered.arg(process.to_string()).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => entered.env(name, value),
                None => entered.env_remove(name),
            };
        }
        entered.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        entered
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.stdin.take());
        self.holder.wait().expect("the script ends with its stdin");
    }
}
