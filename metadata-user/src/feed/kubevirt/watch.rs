//! The two watches of the API server.
//!
//! VMIs have no field that a watch could select, so labels do: that of the node a VMI runs on, and that of the node it
//! migrates to. A watch that breaks, or whose place in history is gone (410), is begun anew after a pause that grows
//! and is random; until then nothing is taken away from anybody.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, watcher as watch};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::core::Origin;
use super::vmi::{NODE_LABEL, TARGET_LABEL};
use super::{Options, Vmi, VmiError};
use crate::feed::FeedError;

/// The first pause after a failure, which doubles up to the last; both are random by half.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The last.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// How often everything is listed again, less or more by a tenth: should a watch have lost something.
const RELIST: Duration = Duration::from_secs(600);
/// How long one watch lasts, in seconds; a server that is silent for longer is given up soon after.
const WATCH_SECONDS: u32 = 120;
/// Objects of one page of a list.
const PAGE: u32 = 500;
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// How long to wait after each failure in a row.
#[derive(Debug, Default)]
struct Pauses {
    failures: u32,
}

impl Iterator for Pauses {
    type Item = Duration;

    /// Between half and all of the next power of two: nodes that lost one server together come back one by one.
    fn next(&mut self) -> Option<Duration> {
        let longest = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LAST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        Some(longest.mul_f64(0.5 + 0.5 * rand::random::<f64>()))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

/// What a watch tells.
#[derive(Debug)]
pub(super) enum Heard {
    /// A VMI is there, or another than it was.
    Applied(Origin, Box<Vmi>),
    /// One is not of this watch any more.
    Gone(Origin, String),
    /// All there were at some moment have been told; these.
    Listed(Origin, BTreeSet<String>),
    /// One cannot be read.
    Unreadable(String, VmiError),
    /// The API server cannot be had.
    Failed(Origin, String),
}

/// The client of the API server: the cluster's the agent is in, or that of a file.
///
/// # Errors
/// Neither is there, or a file asks for a program to be run.
pub(super) async fn client(options: &Options) -> Result<Client, FeedError> {
    let failed = |reason: String| FeedError::Vm { reason };
    let mut config = match &options.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .map_err(|error| failed(format!("kubevirt.kubeconfig: {}: {error}", path.display())))?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|error| failed(format!("kubevirt.kubeconfig: {}: {error}", path.display())))?
        }
        None => kube::Config::incluster().map_err(|error| {
            failed(format!(
                "no access to the cluster's API: {error}; run in a pod, or set kubevirt.kubeconfig"
            ))
        })?,
    };
    if config.auth_info.exec.is_some() {
        let reason =
            "kubevirt.kubeconfig: expected a token or a certificate, found a program to run (`exec`)";
        return Err(failed(reason.into()));
    }
    config.connect_timeout = Some(CONNECT);
    // It would try again for minutes, with pauses of minutes, and nobody would hear of it: `Pauses` are ours.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| failed(format!("no client for the cluster's API: {error}")))
}

/// Tells of the VMIs of a node, until the receiver goes.
pub(super) async fn follow(client: Client, origin: Origin, node: String, heard: mpsc::Sender<Heard>) {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
    let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
    let api: Api<DynamicObject> = Api::all_with(client, &resource);
    let label = if origin == Origin::Coming { TARGET_LABEL } else { NODE_LABEL };
    let config =
        watcher::Config::default().labels(&format!("{label}={node}")).timeout(WATCH_SECONDS).page_size(PAGE);
    loop {
        let until = Instant::now() + RELIST.mul_f64(0.9 + 0.2 * rand::random::<f64>());
        let mut events = pin!(watch(api.clone(), config.clone()).backoff(Pauses::default()));
        let mut listed = BTreeSet::new();
        while let Ok(Some(event)) = timeout_at(until, events.next()).await {
            let told = match event {
                Ok(event) => understand(origin, event, &mut listed),
                Err(error) => Some(Heard::Failed(origin, error.to_string())),
            };
            if let Some(told) = told
                && heard.send(told).await.is_err()
            {
                return;
            }
        }
    }
}

fn understand(
    origin: Origin,
    event: watcher::Event<DynamicObject>,
    listed: &mut BTreeSet<String>,
) -> Option<Heard> {
    match event {
        watcher::Event::Init => {
            listed.clear();
            None
        }
        watcher::Event::InitApply(object) => {
            listed.insert(key(&object));
            Some(applied(origin, object))
        }
        watcher::Event::InitDone => Some(Heard::Listed(origin, std::mem::take(listed))),
        watcher::Event::Apply(object) => Some(applied(origin, object)),
        watcher::Event::Delete(object) => Some(Heard::Gone(origin, key(&object))),
    }
}

fn key(object: &DynamicObject) -> String {
    let meta = &object.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", text(&meta.namespace), text(&meta.name))
}

fn applied(origin: Origin, mut object: DynamicObject) -> Heard {
    let key = key(&object);
    let meta = &object.metadata;
    let vmi = Vmi::from_value(json!({
        "metadata": {
            "name": meta.name, "namespace": meta.namespace, "uid": meta.uid,
            "labels": meta.labels, "annotations": meta.annotations,
        },
        "spec": object.data["spec"].take(),
        "status": object.data.get_mut("status").map(serde_json::Value::take).unwrap_or_else(|| json!({})),
    }));
    match vmi {
        Ok(vmi) => Heard::Applied(origin, Box::new(vmi)),
        Err(error) => Heard::Unreadable(key, error),
    }
}

#[cfg(test)]
mod tests {
    use super::{Backoff as _, FIRST_PAUSE, LAST_PAUSE, Pauses};

    #[test]
    fn pauses_grow_to_a_limit_are_random_and_begin_anew_after_a_success() {
        let mut pauses = Pauses::default();
        let mut longest = FIRST_PAUSE;
        for _ in 0..40 {
            let pause = pauses.next().expect("there is always another try");
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} of {longest:?}");
            longest = (longest * 2).min(LAST_PAUSE);
        }
        pauses.reset();
        assert!(pauses.next().is_some_and(|pause| pause <= FIRST_PAUSE));
        let all: std::collections::BTreeSet<_> =
            (0..8).filter_map(|_| Pauses { failures: 9 }.next()).collect();
        assert!(all.len() > 1, "{all:?}");
    }
}
