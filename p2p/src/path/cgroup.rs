//! Limits of RDMA objects of the process's control groups.

use hmem_core::cause::Facts;

/// The two hierarchies of control groups that can limit RDMA objects: version 2, and the RDMA
/// controller of version 1. The fields are the list of controllers in the line of
/// `/proc/self/cgroup`, the folder with the groups, and a file that each group has.
const VERSIONS: [(&str, &str, &str); 2] =
    [("", "sys/fs/cgroup", "cgroup.controllers"), ("rdma", "sys/fs/cgroup/rdma", "cgroup.procs")];

/// Returns true if a control group of the process has reached its limit of objects of an RDMA
/// device. Returns `None` if that is not known, because the groups cannot be read or a container
/// hides the groups above its own.
pub(super) fn is_full(facts: &Facts) -> Option<bool> {
    let own = facts.text("proc/self/cgroup")?;
    let mut known = None;
    for (controllers, mount, in_every_group) in VERSIONS {
        let group = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            (fields.next()? == controllers).then_some(fields.next()?)
        });
        let Some(group) = group else { continue };
        // A container does not see the groups above its own, which is its root. The root of the
        // machine is not limited, and has no such file.
        let root_is_limited = facts.text(&format!("{mount}/cgroup.type")).is_some();
        facts.text(&format!("{mount}/{in_every_group}"))?;
        let mut path = group.trim_end_matches('/');
        loop {
            if is_group_full(facts, &format!("{mount}{path}")) {
                return Some(true);
            }
            let Some(end) = path.rfind('/') else { break };
            path = &path[..end];
        }
        if root_is_limited {
            return None;
        }
        known = Some(false);
    }
    known
}

/// Returns true if the number of objects of any device has reached the group's limit. The file
/// `rdma.max` has the limits, and `rdma.current` has the present numbers. Each file has one line
/// for each device, such as `mlx5_0 hca_handle=2 hca_object=2000`. The limit `max` means no limit.
fn is_group_full(facts: &Facts, group: &str) -> bool {
    let read = |file| facts.text(&format!("{group}/{file}")).unwrap_or_default();
    let (limits, current) = (read("rdma.max"), read("rdma.current"));
    let objects = |text: &str, device: &str| {
        let mut words = text.lines().map(str::split_whitespace);
        let mut fields = words.find_map(|mut line| (line.next()? == device).then_some(line))?;
        fields.find_map(|field| field.strip_prefix("hca_object=")?.parse::<u64>().ok())
    };
    limits.lines().filter_map(|line| line.split_whitespace().next()).any(|device| {
        let limit = objects(&limits, device);
        limit.is_some_and(|limit| objects(&current, device).is_some_and(|used| used >= limit))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn full_group_is_found_among_the_groups_above_the_process() {
        let files = |of: &[(&str, &str)]| {
            let root = std::env::temp_dir().join(format!("hmem-cgroup-{}", std::process::id()));
            for (path, text) in of {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("create");
                fs::write(path, text).expect("write");
            }
            let facts = Facts { root: Some(root.clone()), ..Facts::default() };
            let full = is_full(&facts);
            let _ = fs::remove_dir_all(root);
            full
        };
        let own = ("proc/self/cgroup", "0::/a/b\n");
        let mounted = ("sys/fs/cgroup/cgroup.controllers", "rdma");
        let limit = ("sys/fs/cgroup/a/rdma.max", "mlx5_0 hca_handle=max hca_object=20\n");
        let used = |text| ("sys/fs/cgroup/a/rdma.current", text);
        assert_eq!(files(&[]), None);
        assert_eq!(files(&[own]), None, "no mounted groups");
        assert_eq!(files(&[own, mounted]), Some(false), "no limit");
        let full = used("mlx5_1 hca_handle=1 hca_object=3\nmlx5_0 hca_handle=1 hca_object=20\n");
        assert_eq!(files(&[own, mounted, limit, full]), Some(true));
        let free = used("mlx5_0 hca_handle=1 hca_object=19\n");
        assert_eq!(files(&[own, mounted, limit, free]), Some(false));
        // In a container, groups above the root are hidden.
        let hidden = ("sys/fs/cgroup/cgroup.type", "domain\n");
        assert_eq!(files(&[own, mounted, limit, free, hidden]), None);
        assert_eq!(files(&[own, mounted, limit, full, hidden]), Some(true));
        // Version 1 beside version 2.
        let both = ("proc/self/cgroup", "9:rdma:/c\n0::/\n");
        let v1 = [
            ("sys/fs/cgroup/rdma/cgroup.procs", ""),
            ("sys/fs/cgroup/rdma/c/rdma.max", "mlx5_0 hca_object=4"),
            ("sys/fs/cgroup/rdma/c/rdma.current", "mlx5_0 hca_object=4"),
        ];
        assert_eq!(files(&[both, mounted, v1[0], v1[1], v1[2]]), Some(true));
    }
}
