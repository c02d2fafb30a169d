//! The kernel modules of a guest.

use anyhow::{Context as _, Result, bail};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use testbed::netns::run;

/// Modules for taps, veths, bridges, classifiers and guests behind vhost-net. A kernel may have some of them built in.
const WANTED: [&str; 8] =
    ["tun", "veth", "bridge", "sch_ingress", "cls_bpf", "macvlan", "dummy", "vhost_net"];

/// Returns the files of the wanted modules and of those they depend on, in the order in which they can be loaded.
/// `root` has `lib/modules/RELEASE`.
pub(crate) fn find(root: &Path) -> Result<Vec<PathBuf>> {
    let above = root.join("lib/modules");
    let Ok(entries) = fs::read_dir(&above) else { return Ok(Vec::new()) };
    let releases = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    let [release] = &releases[..] else {
        bail!("expected modules of one kernel in {}, found {}", above.display(), releases.len());
    };
    shell::tools::ensure(&[("depmod", "kmod")])?;
    let depmod = shell::which("depmod").context("kmod is installed")?;
    let table = run(Command::new(depmod).arg("-n").arg("-b").arg(root).arg(release))?;
    Ok(in_order(&table).into_iter().map(|name| above.join(release).join(name)).collect())
}

/// Reads a table of `depmod`: `kernel/….ko: DEPENDENCY…`, of which the last can be loaded first.
fn in_order(table: &str) -> Vec<String> {
    let lines = table.lines().take_while(|line| !line.starts_with("alias "));
    let modules: HashMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(file, after)| (name(file), (file, after)))
        .collect();
    let mut files: Vec<String> = Vec::new();
    for (file, after) in WANTED.iter().filter_map(|wanted| modules.get(*wanted)) {
        for file in after.split_whitespace().rev().chain([*file]) {
            if !files.iter().any(|known| known == file) {
                files.push(file.to_owned());
            }
        }
    }
    files
}

/// The name of a module in a file, which may be compressed.
fn name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::in_order;

    #[test]
    fn dependencies_come_before_the_modules_that_need_them_and_once() {
        let table = "kernel/net/llc/llc.ko.xz:\n\
                     kernel/net/802/stp.ko.xz: kernel/net/llc/llc.ko.xz\n\
                     kernel/net/bridge/bridge.ko.xz: kernel/net/802/stp.ko.xz kernel/net/llc/llc.ko.xz\n\
                     kernel/net/sched/sch-ingress.ko: kernel/net/llc/llc.ko.xz\n\
                     kernel/net/other.ko:\n\
                     alias tun kernel/drivers/net/tun.ko: wrong\n";
        assert_eq!(
            in_order(table),
            [
                "kernel/net/llc/llc.ko.xz",
                "kernel/net/802/stp.ko.xz",
                "kernel/net/bridge/bridge.ko.xz",
                "kernel/net/sched/sch-ingress.ko"
            ]
        );
    }
}
