//! Each test passes in events of a VMI and its pods, and compares the resulting actions.

mod data;
mod launcher;
mod life;
mod origins;
mod replay;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Action, Core, VmiOrigin};
use crate::FeedEvent;
use crate::kubevirt::translate::VolumeFiles;
use crate::kubevirt::{KubevirtOptions, Vmi};
use crate::pods::{Pod, PodEvent, PodUid, Tap, TapKind};
use metadata_content::record::RecordLimits;

/// Volumes by pod and name.
type Disk = Arc<Mutex<BTreeMap<(String, String), VolumeFiles>>>;

/// A core, the current time, and the volumes of its pods.
struct Story {
    core: Core,
    now: Instant,
    disk: Disk,
}

fn vmi(pods: &[&str]) -> Value {
    let active: BTreeMap<_, _> = pods.iter().map(|uid| (*uid, "here")).collect();
    json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10",
            "ownerReferences": []},
        "spec": {
            "domain": {
                "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"},
                "devices": {"interfaces": [{"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:01"}]},
            },
            "networks": [{"name": "default", "pod": {}}],
        },
        "status": {"phase": "Running", "activePods": active},
    })
}

/// Like [`vmi`], with user-data in a Secret.
fn secretive(pods: &[&str]) -> Value {
    let mut vmi = vmi(pods);
    vmi["spec"]["volumes"] = json!([{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}]);
    vmi
}

fn named(name: &str) -> Value {
    let mut vmi = vmi(&["p"]);
    vmi["metadata"]["name"] = name.into();
    vmi
}

fn pod(uid: &str, pid: u32) -> Pod {
    Pod {
        uid: uid.parse().expect("a uid"),
        pid,
        netns: format!("/proc/{pid}/ns/net"),
        taps: vec![Tap {
            ifname: "tap0".into(),
            kind: TapKind::Tap,
            mac: metadata_common::mac::Mac::default(),
            queues: 1,
        }],
        nics: Vec::new(),
    }
}

impl Story {
    fn begin() -> Self {
        Self::with(KubevirtOptions::default())
    }

    fn with(options: KubevirtOptions) -> Self {
        let disk = Disk::default();
        let volumes = Arc::clone(&disk);
        let read = move |uid: &PodUid, volume: &str| {
            let place = (format!("{uid}"), volume.to_owned());
            Ok(volumes.lock().expect("no panic").get(&place).cloned())
        };
        let core = Core::new("here".into(), options, RecordLimits::DEFAULT, 100, Arc::new(read));
        Self { core, now: Instant::now(), disk }
    }

    fn put(&self, uid: &str, volume: &str, file: &str, text: &str) {
        let files = VolumeFiles::from([(file.to_owned(), text.to_owned().into())]);
        self.disk.lock().expect("no panic").insert((uid.into(), volume.into()), files);
    }

    fn apply(&mut self, origin: VmiOrigin, vmi: Value) -> Vec<String> {
        self.core.applied(origin, Vmi::from_value(vmi).expect("a VMI"), self.now);
        self.actions()
    }

    fn lose(&mut self, origin: VmiOrigin) -> Vec<String> {
        self.core.gone(origin, "shop/web", self.now);
        self.actions()
    }

    fn pod(&mut self, uid: &str, event: PodEvent) -> Vec<String> {
        self.core.pod(&uid.parse().expect("a uid"), event, self.now);
        self.actions()
    }

    fn found(&mut self, uid: &str) -> Vec<String> {
        self.pod(uid, PodEvent::Found(pod(uid, 42)))
    }

    fn pass(&mut self, time: Duration) -> Vec<String> {
        self.now += time;
        self.core.tick(self.now);
        self.actions()
    }

    /// Runs all translations, and waits until each may run.
    fn translate(&mut self) {
        loop {
            if let Some(job) = self.core.next_job(self.now) {
                self.core.translated(job.run(), self.now);
            } else if let Some(ready) = self.core.next_job_at() {
                self.now = self.now.max(ready);
            } else {
                return;
            }
        }
    }

    /// The actions since the last call, abbreviated. They omit watched volumes, which another test covers.
    fn actions(&mut self) -> Vec<String> {
        self.translate();
        let actions = self.core.actions().into_iter();
        let actions =
            actions.filter(|action| !matches!(action, Action::Watch(_, volumes) if !volumes.is_empty()));
        let word = |action| match action {
            Action::Publish(FeedEvent::Upsert { key, record }) => format!("+{key} {}", record.generation),
            Action::Publish(FeedEvent::Expect { key, identities }) => format!("?{key} {}", identities.len()),
            Action::Publish(FeedEvent::Remove { key }) => format!("-{key}"),
            Action::Publish(FeedEvent::Rejected { key, .. }) => format!("!{key}"),
            Action::Publish(FeedEvent::Synced) => "synced".into(),
            Action::Watch(uid, _) => format!("watch {uid}"),
            Action::Inlet(uid, mac) => {
                format!("inlet {uid} {}", mac.map_or("none".into(), |mac| mac.to_string()))
            }
            Action::Leave(uid) => format!("leave {uid}"),
            Action::Report(report) => format!("{} {}", report.reason.as_str(), report.name),
        };
        actions.map(word).collect()
    }
}

const NOTHING: [&str; 0] = [];
