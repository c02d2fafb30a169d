//! Writes a ConfigMap of the cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::runtime::Builder;

use super::{Options, client};
use crate::FeedError;

/// The name under which the API server keeps who wrote a field.
const MANAGER: &str = "xdp-imds-identity";

/// Replaces these keys of a ConfigMap, as a program in a pod of the cluster or by `kubeconfig`. Others stay as they are.
///
/// # Errors
/// The API server cannot be reached or refuses; the error says what the role lacks.
pub fn replace(
    kubeconfig: Option<PathBuf>,
    namespace: &str,
    name: &str,
    data: &BTreeMap<&str, String>,
) -> Result<(), FeedError> {
    let options = Options { kubeconfig, ..Options::default() };
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data});
    let refused = |error: &kube::Error| FeedError::Vm {
        reason: format!(
            "ConfigMap {namespace}/{name}: {}; expected a ConfigMap of this name, and a role that may `patch` it",
            client::failure(error).reason
        ),
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| FeedError::Vm { reason: error.to_string() })?;
    runtime.block_on(async {
        let maps: Api<ConfigMap> = Api::namespaced(client::open(&options).await?, namespace);
        let parameters = PatchParams::apply(MANAGER).force();
        maps.patch(name, &parameters, &Patch::Apply(object)).await.map(drop).map_err(|error| refused(&error))
    })
}
