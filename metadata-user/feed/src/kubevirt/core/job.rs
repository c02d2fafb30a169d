//! A translation, away from the core: the caller runs it on a thread that may take long.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_base::share::Tenant;

use crate::kubevirt::translate::{Translation, translate};
use crate::kubevirt::volumes::{BudgetedVolumes, ReadVolumes};
use crate::kubevirt::{Options, Vmi};
use crate::pods::{Pod, PodUid};
use metadata_content::record::Limits;

/// A VMI to translate in some of its pods.
pub struct Job {
    pub(super) key: String,
    pub(super) tenant: Tenant,
    pub(super) vmi: Arc<Vmi>,
    pub(super) pods: Vec<(PodUid, Pod)>,
    pub(super) read: Arc<dyn ReadVolumes>,
    pub(super) options: Arc<Options>,
    pub(super) limits: Arc<Limits>,
}

/// The result of a [`Job`], for [`Core::translated`](super::Core::translated).
pub struct JobResult {
    pub(super) key: String,
    pub(super) vmi: Arc<Vmi>,
    pub(super) pods: Vec<(PodUid, Translation, BTreeSet<String>)>,
    pub(super) took: Duration,
}

impl Job {
    /// Reads the volumes and makes the records. Blocks while it reads files.
    #[must_use]
    pub fn run(self) -> JobResult {
        let Self { key, tenant, vmi, pods, read, options, limits } = self;
        let start = Instant::now();
        let each = pods.into_iter().map(|(uid, pod)| {
            let volumes = BudgetedVolumes::new(&*read, &tenant, &uid);
            let translation = translate(&vmi, &pod, &volumes, &options, &limits);
            let names = volumes.into_names();
            read.keep_only(&uid, &names);
            (uid, translation, names)
        });
        let pods = each.collect();
        JobResult { key, vmi, pods, took: start.elapsed() }
    }
}
