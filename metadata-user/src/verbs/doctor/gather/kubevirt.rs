//! Collects the facts about the needs of KubeVirt's feed.

use std::path::Path;

use super::super::facts::Kubevirt;
use super::room::directory;
use crate::config::Config;
use metadata_feed::kubevirt::{access, node};

/// Returns the state of everything that KubeVirt's feed needs; `None` if the feed is off.
pub(super) fn kubevirt(config: &Config) -> Option<Kubevirt> {
    let options = config.kubevirt.as_ref()?;
    Some(Kubevirt {
        node: node(options).map_err(|error| error.to_string()),
        api: options.watch.then(|| access(options).map_err(|error| error.to_string())),
        pods: directory(&options.pods()),
        cgroups: directory(&options.cgroups),
        hook: options.hook.as_deref().and_then(Path::parent).map(directory),
    })
}
