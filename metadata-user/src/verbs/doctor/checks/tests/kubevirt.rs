//! Tests the checks of what KubeVirt's feed needs.

use super::super::super::CheckStatus::{Fail, Warn};
use super::super::super::facts::{Facts, Kubevirt, PathFacts};
use super::super::all;
use super::{healthy, judge, refused, wrong};

fn needs(facts: &mut Facts) -> &mut Kubevirt {
    facts.kubevirt.as_mut().expect("the feed is on")
}

fn file() -> PathFacts {
    PathFacts { directory: false, mode: 0o644, owner: 0 }
}

#[test]
fn the_needs_of_kubevirts_feed_are_checked() {
    judge(&[
        (
            "no name of the node",
            |f| needs(f).node = Err("found none".into()),
            "kubevirt.node",
            Fail,
            &["found none", "NODE_NAME", "spec.nodeName"],
        ),
        (
            "no access to the API server",
            |f| needs(f).api = Some(Err("no token".into())),
            "kubevirt.api",
            Fail,
            &["no token", "automountServiceAccountToken", "kubeconfig"],
        ),
        (
            "no directory of pods",
            |f| needs(f).pods.found = Ok(None),
            "kubevirt.kubelet",
            Fail,
            &["/some/directory does not exist", "kubelet: DIR", "/var/lib/kubelet"],
        ),
        (
            "a file in place of the directory of pods",
            |f| needs(f).pods.found = Ok(Some(file())),
            "kubevirt.kubelet",
            Fail,
            &["not a directory"],
        ),
        (
            "no permission for the directory of pods",
            |f| needs(f).pods.found = Err(refused()),
            "kubevirt.kubelet",
            Fail,
            &["Operation not permitted"],
        ),
        (
            "no control groups",
            |f| needs(f).cgroups.found = Ok(None),
            "kubevirt.cgroups",
            Warn,
            &["does not exist", "/sys/fs/cgroup"],
        ),
        (
            "a file in place of the control groups",
            |f| needs(f).cgroups.found = Ok(Some(file())),
            "kubevirt.cgroups",
            Warn,
            &["not a directory"],
        ),
        (
            "no directory for the hook's socket",
            |f| needs(f).hook.as_mut().expect("it is on").found = Ok(None),
            "kubevirt.hook",
            Fail,
            &["does not exist", "hook"],
        ),
    ]);
}

#[test]
fn a_feed_that_is_off_or_watches_nothing_has_no_problems() {
    let mut facts = healthy();
    needs(&mut facts).api = None;
    needs(&mut facts).hook = None;
    assert_eq!(wrong(&all(&facts)), Vec::<&super::Check>::new());
    facts.kubevirt = None;
    assert!(all(&facts).iter().all(|check| !check.name.starts_with("kubevirt.")));
}
