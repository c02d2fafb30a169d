//! Checks the kernel: its version, its features, and what it permits to this process.

use super::super::{Check, Facts, Kernel};
use super::privilege;
use metadata_steer::Mode;
use metadata_steer::probe::{Failure, Feature, KERNEL, TCX_KERNEL};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(&facts.kernel)];
    checks.extend(facts.kernel.features.iter().map(|(feature, had)| self::feature(*feature, had, facts)));
    checks.push(tun(&facts.kernel));
    checks.extend(lockdown(&facts.kernel));
    checks.extend(unprivileged(&facts.kernel));
    checks.push(rehearsal(facts));
    checks
}

/// Reads the major and minor number of a kernel release; `None` if the release does not begin with two numbers.
fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn version(kernel: &Kernel) -> Check {
    let (name, found) = ("kernel.version", format!("Linux {}", kernel.release));
    let (major, minor) = KERNEL;
    let expected = format!("Linux {major}.{minor} or later");
    match numbers(&kernel.release) {
        Some(version) if version >= KERNEL => Check::ok(name, found),
        Some(_) => Check::fail(
            name,
            format!("{found} is too old"),
            expected,
            "Boot a newer kernel. Linux 6.6 or later also reduces the CPU time for guests' bulk traffic",
        ),
        None => Check::warn(
            name,
            found,
            expected,
            "Rely on the checks of features below, because the version cannot be read",
        ),
    }
}

/// Returns the name of a feature's check, the feature's description, and the kernel version or build option that
/// provides the feature.
fn words(feature: Feature) -> (&'static str, &'static str, &'static str) {
    match feature {
        Feature::Bpf => ("kernel.bpf", "bpf(2)", "CONFIG_BPF_SYSCALL"),
        Feature::Xdp => ("kernel.xdp", "XDP programs", "CONFIG_BPF_SYSCALL and CONFIG_NET"),
        Feature::DeviceMap => ("kernel.devmap_hash", "maps of type DEVMAP_HASH", "Linux 5.4 or later"),
        Feature::SocketMap => ("kernel.xskmap", "maps of type XSKMAP", "CONFIG_XDP_SOCKETS"),
        Feature::Socket => ("kernel.af_xdp", "AF_XDP sockets", "CONFIG_XDP_SOCKETS"),
        Feature::RingBuffer => ("kernel.ring_buffer", "BPF ring buffers", "Linux 5.8 or later"),
        Feature::Btf => ("kernel.btf", "BTF type information", "CONFIG_DEBUG_INFO_BTF"),
        Feature::Link => ("kernel.xdp_link", "XDP attachment by bpf_link", "Linux 5.9 or later"),
        Feature::LinkUpdate => {
            ("kernel.link_update", "atomic replacement of an XDP program", "Linux 5.9 or later")
        }
        Feature::Tcx => ("kernel.tcx", "tcx classifiers", "Linux 6.6 or later with CONFIG_NET_XGRESS"),
    }
}

fn feature(feature: Feature, had: &Result<bool, Failure>, facts: &Facts) -> Check {
    let (name, what, comes_with) = words(feature);
    match had {
        Ok(true) => Check::ok(name, format!("the kernel has {what}")),
        Ok(false) => absent(feature, facts),
        // A capability is missing, and the check of that capability fails. This feature may exist, so this check only
        // warns.
        Err(failure) if failure.is_refusal() && privilege::is_missing_any(facts) => Check::warn(
            name,
            format!("unknown: {failure}"),
            what,
            "Run doctor again with the missing capabilities",
        ),
        Err(failure) if failure.is_refusal() => Check::fail(
            name,
            format!("{failure}, although the process has all needed capabilities"),
            what,
            "Find out whether a security module (SELinux, AppArmor), a seccomp filter or kernel lockdown forbids this",
        ),
        Err(failure) if failure.errno == Some(libc::EMFILE) => {
            Check::warn(name, format!("unknown: {failure}"), what, "Raise the limit on open files first")
        }
        Err(failure) => Check::fail(
            name,
            failure.text.clone(),
            what,
            format!("Check that the kernel provides this feature ({comes_with})"),
        ),
    }
}

fn absent(feature: Feature, facts: &Facts) -> Check {
    let (name, what, comes_with) = words(feature);
    let found = format!("the kernel has no {what}");
    let expected = format!("{what} ({comes_with})");
    match feature {
        Feature::Tcx if facts.wanted.steer == Mode::Tcx => {
            let (major, minor) = TCX_KERNEL;
            let remedy = format!("Set `steer: auto` or `steer: xdp`, or boot Linux {major}.{minor} or later");
            Check::fail(name, found, expected, remedy)
        }
        Feature::Tcx if facts.wanted.steer == Mode::Xdp => {
            Check::ok(name, format!("{found}, and `steer: xdp` does not need it"))
        }
        Feature::Tcx => Check::warn(
            name,
            found,
            expected,
            "No action is needed, but the bulk traffic of a guest costs more CPU time, also after the guest has booted",
        ),
        Feature::Btf => Check::warn(
            name,
            found,
            expected,
            "No action is needed, but tools such as bpftool cannot show the fields of the maps",
        ),
        _ => Check::fail(
            name,
            found,
            expected,
            format!("Boot a kernel that provides this feature ({comes_with})"),
        ),
    }
}

fn tun(kernel: &Kernel) -> Check {
    let (name, expected) = ("tun", "/dev/net/tun, through which the agent sends answers");
    match &kernel.tun {
        Ok(()) => Check::ok(name, "/dev/net/tun can be opened"),
        Err(failure) => {
            let remedy = match failure.errno {
                Some(libc::ENOENT) => "In a container, mount /dev/net/tun. On a node, run `modprobe tun`",
                Some(libc::ENODEV) => "Run `modprobe tun`",
                Some(libc::EPERM) => {
                    "Allow the device c 10:200 rwm in the container's device cgroup (systemd: DeviceAllow=/dev/net/tun)"
                }
                _ => "Let the agent's user read and write /dev/net/tun",
            };
            Check::fail(name, format!("/dev/net/tun: {failure}"), expected, remedy)
        }
    }
}

fn lockdown(kernel: &Kernel) -> Option<Check> {
    let text = kernel.lockdown.as_ref()?;
    let mode = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
    let name = "kernel.lockdown";
    let refused = matches!(&kernel.rehearsal, Err(failure) if failure.is_refusal());
    Some(if mode != "none" && refused {
        let remedy = "If no capability is missing, boot with lockdown=none or without Secure Boot";
        Check::warn(
            name,
            format!("the lockdown mode is {mode}, and the kernel refused the rehearsal"),
            "lockdown mode none",
            remedy,
        )
    } else {
        Check::ok(name, format!("the lockdown mode is {mode}, which does not affect the agent"))
    })
}

fn unprivileged(kernel: &Kernel) -> Option<Check> {
    let value = kernel.unprivileged_bpf.as_ref()?;
    Some(Check::ok(
        "kernel.unprivileged_bpf",
        format!("kernel.unprivileged_bpf_disabled is {value}, which has no effect on a process with CAP_BPF"),
    ))
}

/// Checks the rehearsal, which starts serving in a temporary network namespace. It uses the features that the other
/// checks of the kernel test.
fn rehearsal(facts: &Facts) -> Check {
    let name = "rehearsal";
    match &facts.kernel.rehearsal {
        Ok(()) => {
            let found = "a hub, its AF_XDP socket and a port started in a temporary network namespace";
            Check::ok(name, found)
        }
        Err(failure) => Check::fail(
            name,
            failure.text.clone(),
            "that a hub, its AF_XDP socket and a port start in a temporary network namespace",
            "Solve the problems that other checks report. If there are none, solve this error",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn the_first_two_numbers_of_a_release_are_read() {
        let cases = [
            ("6.18.44-fc-v595", Some((6, 18))),
            ("5.15", Some((5, 15))),
            ("2.6.78", Some((2, 6))),
            ("6.1-rc3", Some((6, 1))),
            ("six", None),
            ("6", None),
        ];
        for (release, expected) in cases {
            assert_eq!(numbers(release), expected, "{release}");
        }
    }
}
