//! The kernel: what it is, what it can do, what it lets this process do.

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
        None => Check::warn(name, found, expected, "Go by the features below: the number cannot be read"),
    }
}

/// What a feature is called, what it is for, and the part of the kernel's configuration it comes with.
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
        // What is missing is said by the check of that; here it only hides the answer.
        Err(failure) if failure.is_refusal() && privilege::is_missing_any(facts) => Check::warn(
            name,
            format!("not found out: {failure}"),
            what,
            "Look again once the capabilities are there",
        ),
        Err(failure) if failure.is_refusal() => Check::fail(
            name,
            format!("{failure}, though the capabilities are there"),
            what,
            "See whether a security module (SELinux, AppArmor), a seccomp filter or kernel lockdown forbids it",
        ),
        Err(failure) if failure.errno == Some(libc::EMFILE) => Check::warn(
            name,
            format!("not found out: {failure}"),
            what,
            "Raise the limit on open files first",
        ),
        Err(failure) => Check::fail(name, failure.text.clone(), what, format!("It comes with {comes_with}")),
    }
}

fn absent(feature: Feature, facts: &Facts) -> Check {
    let (name, what, comes_with) = words(feature);
    let found = format!("the kernel has no {what}");
    let expected = format!("them, as with {comes_with}");
    match feature {
        Feature::Tcx if facts.wanted.steer == Mode::Tcx => {
            let (major, minor) = TCX_KERNEL;
            let remedy = format!("Set `steer: auto` or `steer: xdp`, or boot Linux {major}.{minor} or later");
            Check::fail(name, found, expected, remedy)
        }
        Feature::Tcx if facts.wanted.steer == Mode::Xdp => {
            Check::ok(name, format!("{found}, nor is it asked to"))
        }
        Feature::Tcx => Check::warn(
            name,
            found,
            expected,
            "Nothing need be done; guests that send bulk pay for XDP also after their boot",
        ),
        Feature::Btf => {
            Check::warn(name, found, expected, "Nothing need be done; tools then cannot show the maps")
        }
        _ => Check::fail(name, found, expected, "Boot a kernel built with it"),
    }
}

fn tun(kernel: &Kernel) -> Check {
    let (name, expected) = ("tun", "to open /dev/net/tun, by which answers leave");
    match &kernel.tun {
        Ok(()) => Check::ok(name, "/dev/net/tun can be opened"),
        Err(failure) => {
            let remedy = match failure.errno {
                Some(libc::ENOENT) => {
                    "In a container, let the device in (or mount /dev/net/tun); on a node, `modprobe tun`"
                }
                Some(libc::ENODEV) => "`modprobe tun`",
                Some(libc::EPERM) => {
                    "Let the container's device cgroup have c 10:200 rwm (systemd: DeviceAllow=/dev/net/tun)"
                }
                _ => "Let the agent's user read and write it",
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
        let remedy = "If the capabilities are there, boot with lockdown=none or with Secure Boot off";
        Check::warn(
            name,
            format!("lockdown is {mode}, and the kernel refused"),
            "none, or nothing refused",
            remedy,
        )
    } else {
        Check::ok(name, format!("lockdown is {mode}, which forbids nothing that steering does"))
    })
}

fn unprivileged(kernel: &Kernel) -> Option<Check> {
    let value = kernel.unprivileged_bpf.as_ref()?;
    Some(Check::ok(
        "kernel.unprivileged_bpf",
        format!("kernel.unprivileged_bpf_disabled is {value}, which makes no difference: CAP_BPF counts"),
    ))
}

/// The proof: all of the above matters only for this.
fn rehearsal(facts: &Facts) -> Check {
    let name = "rehearsal";
    match &facts.kernel.rehearsal {
        Ok(()) => {
            let found = "the hub, its socket and a port came up in a namespace of their own, and went";
            Check::ok(name, found)
        }
        Err(failure) => Check::fail(
            name,
            failure.text.clone(),
            "the hub, its socket and a port to come up in a namespace of their own",
            "Do what the other checks say; if they say nothing, this error is the cause",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn a_release_is_read_as_far_as_its_second_number() {
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
