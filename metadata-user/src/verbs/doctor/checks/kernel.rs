//! The kernel: version, features and permissions.

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

/// Major and minor number of a release.
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
            "Boot a newer kernel; 6.6 or later also steers quiet guests by tcx",
        ),
        None => Check::warn(
            name,
            found,
            expected,
            "Rely on the features below, because the version cannot be read",
        ),
    }
}

/// The check of a feature, its description, and the kernel version or option that provides it.
fn words(feature: Feature) -> (&'static str, &'static str, &'static str) {
    match feature {
        Feature::Bpf => ("kernel.bpf", "bpf(2)", "CONFIG_BPF_SYSCALL"),
        Feature::Xdp => ("kernel.xdp", "XDP programs", "CONFIG_BPF_SYSCALL and CONFIG_NET"),
        Feature::DeviceMap => ("kernel.devmap_hash", "device maps by hash", "Linux 5.4"),
        Feature::SocketMap => ("kernel.xskmap", "maps of AF_XDP sockets", "CONFIG_XDP_SOCKETS"),
        Feature::Socket => ("kernel.af_xdp", "AF_XDP sockets", "CONFIG_XDP_SOCKETS"),
        Feature::RingBuffer => ("kernel.ring_buffer", "BPF ring buffers", "Linux 5.8"),
        Feature::Btf => ("kernel.btf", "type information", "CONFIG_DEBUG_INFO_BTF"),
        Feature::Link => ("kernel.xdp_link", "XDP by bpf_link", "Linux 5.9"),
        Feature::LinkUpdate => ("kernel.link_update", "replacing a program in one step", "Linux 5.9"),
        Feature::Tcx => ("kernel.tcx", "classifiers by bpf_link (tcx)", "Linux 6.6 and CONFIG_NET_XGRESS"),
    }
}

fn feature(feature: Feature, had: &Result<bool, Failure>, facts: &Facts) -> Check {
    let (name, what, comes_with) = words(feature);
    match had {
        Ok(true) => Check::ok(name, format!("the kernel has {what}")),
        Ok(false) => absent(feature, facts),
        // The check of the missing capability reports the problem. The result for this feature is only unknown.
        Err(failure) if failure.is_refusal() && privilege::is_missing_any(facts) => {
            Check::warn(name, format!("unknown: {failure}"), what, "Check again with the capabilities")
        }
        Err(failure) if failure.is_refusal() => Check::fail(
            name,
            format!("{failure}, although the process has the capabilities"),
            what,
            "Check whether a security module (SELinux, AppArmor), a seccomp filter or kernel lockdown forbids it",
        ),
        Err(failure) if failure.errno == Some(libc::EMFILE) => {
            Check::warn(name, format!("unknown: {failure}"), what, "Raise the limit on open files first")
        }
        Err(failure) => {
            Check::fail(name, failure.text.clone(), what, format!("Check that the kernel has {comes_with}"))
        }
    }
}

fn absent(feature: Feature, facts: &Facts) -> Check {
    let (name, what, comes_with) = words(feature);
    let found = format!("the kernel has no {what}");
    let expected = format!("{what}, provided by {comes_with}");
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
            "No action is needed, but guests' bulk traffic costs more CPU, even after their boot",
        ),
        Feature::Btf => {
            Check::warn(name, found, expected, "No action is needed, but tools cannot show the maps")
        }
        _ => Check::fail(name, found, expected, format!("Boot a kernel with {comes_with}")),
    }
}

fn tun(kernel: &Kernel) -> Check {
    let (name, expected) = ("tun", "/dev/net/tun, through which the agent sends answers");
    match &kernel.tun {
        Ok(()) => Check::ok(name, "/dev/net/tun can be opened"),
        Err(failure) => {
            let remedy = match failure.errno {
                Some(libc::ENOENT) => "In a container, mount /dev/net/tun; on a node, run `modprobe tun`",
                Some(libc::ENODEV) => "Run `modprobe tun`",
                Some(libc::EPERM) => {
                    "Allow c 10:200 rwm in the container's device cgroup (systemd: DeviceAllow=/dev/net/tun)"
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
        let remedy = "If the process has the capabilities, boot with lockdown=none or without Secure Boot";
        Check::warn(name, format!("lockdown is {mode}, and the kernel refused the rehearsal"), "none", remedy)
    } else {
        Check::ok(name, format!("lockdown is {mode}, which does not affect steering"))
    })
}

fn unprivileged(kernel: &Kernel) -> Option<Check> {
    let value = kernel.unprivileged_bpf.as_ref()?;
    Some(Check::ok(
        "kernel.unprivileged_bpf",
        format!("kernel.unprivileged_bpf_disabled is {value}, which has no effect on a process with CAP_BPF"),
    ))
}

/// Checks that serving starts in a temporary namespace, which needs everything that the other checks of the kernel
/// test.
fn rehearsal(facts: &Facts) -> Check {
    let name = "rehearsal";
    match &facts.kernel.rehearsal {
        Ok(()) => {
            let found = "the hub, its socket and a port started in a temporary namespace";
            Check::ok(name, found)
        }
        Err(failure) => Check::fail(
            name,
            failure.text.clone(),
            "the hub, its socket and a port to start in a temporary namespace",
            "Solve the problems that other checks report; if there are none, solve this error",
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
