//! Checks the kernel: its features, and what it permits to this process.

use super::super::{Check, Facts, Kernel};
use super::privilege;
use metadata_steer::SteeringMode;
use metadata_steer::probe::{Feature, FeatureText, ProbeError, ProbeResult};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(&facts.kernel)];
    checks.extend(facts.kernel.features.iter().map(|(feature, had)| self::feature(*feature, had, facts)));
    checks.push(helpers(facts));
    checks.push(tun(&facts.kernel));
    checks.extend(lockdown(&facts.kernel));
    checks.extend(unprivileged(&facts.kernel));
    checks.push(rehearsal(facts));
    checks
}

/// Names the version for reports. It decides nothing: vendors port features back, and leave options out.
fn version(kernel: &Kernel) -> Check {
    let found = format!("Linux {}; the checks below test what it can, whatever its version", kernel.release);
    Check::ok("kernel.version", found)
}

fn feature(feature: Feature, had: &ProbeResult, facts: &Facts) -> Check {
    let FeatureText { check, what, gives, comes_with, .. } = feature.words();
    match had {
        Ok(true) => Check::ok(check, format!("the kernel has {what}, for {gives}")),
        Ok(false) => absent(feature, facts),
        Err(failure) => unknown(check, what, comes_with, failure, facts),
    }
}

/// Reports a test without a result.
fn unknown(check: &'static str, what: &str, comes_with: &str, failure: &ProbeError, facts: &Facts) -> Check {
    if failure.is_refusal() && privilege::is_missing_any(facts) {
        // The check of the missing capability fails. The feature may exist, so this check only warns.
        let remedy = "Run doctor again with the missing capabilities";
        Check::warn(check, format!("unknown: {failure}"), what, remedy)
    } else if failure.is_refusal() {
        let found = format!("{failure}, although the process has all needed capabilities");
        let remedy = "Find out whether a security module (SELinux, AppArmor), a seccomp filter or kernel lockdown forbids this";
        Check::fail(check, found, what, remedy)
    } else if failure.errno == Some(libc::EMFILE) {
        Check::warn(check, format!("unknown: {failure}"), what, "Raise the limit on open files first")
    } else {
        let remedy = format!("Check that the kernel provides this feature ({comes_with})");
        Check::fail(check, failure.text.clone(), what, remedy)
    }
}

fn absent(feature: Feature, facts: &Facts) -> Check {
    let FeatureText { check, what, without, comes_with, .. } = feature.words();
    let found = format!("the kernel has no {what}");
    let expected = format!("{what} ({comes_with})");
    match (feature, without) {
        (Feature::Tcx, _) if facts.wanted.steer == SteeringMode::Tcx => {
            let found = format!("{found}, so the agent does not start with `steer: tcx`");
            let remedy =
                format!("Set `steer: auto` or `steer: xdp`, or boot a kernel that has them ({comes_with})");
            Check::fail(check, found, expected, remedy)
        }
        (Feature::Tcx, _) if facts.wanted.steer == SteeringMode::Xdp => {
            Check::ok(check, format!("{found}, and `steer: xdp` does not need it"))
        }
        (_, Some(without)) => {
            Check::warn(check, format!("{found}: {without}"), expected, "No action is needed to serve guests")
        }
        (_, None) => Check::fail(
            check,
            format!("{found}, so the agent does not start"),
            expected,
            format!("Boot a kernel that provides this feature ({comes_with})"),
        ),
    }
}

/// Checks the kernel's functions that the eBPF programs call.
fn helpers(facts: &Facts) -> Check {
    let (name, what) = ("kernel.helpers", "the functions that the eBPF programs call (bpf-helpers(7))");
    let comes_with = "all of them since Linux 5.8";
    match &facts.kernel.missing_helpers {
        Ok(missing) if missing.is_empty() => Check::ok(name, format!("the kernel has {what}")),
        Ok(missing) => Check::fail(
            name,
            format!("the kernel has no {}, so the agent does not start", missing.join(", ")),
            what,
            format!("Boot a kernel that provides them ({comes_with})"),
        ),
        Err(failure) => unknown(name, what, comes_with, failure, facts),
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
