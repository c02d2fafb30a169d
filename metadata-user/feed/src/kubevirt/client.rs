//! The client of the cluster's API server.

use std::error::Error;
use std::time::{Duration, Instant};

use kube::Client;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use tokio::runtime::Builder;
use tower::filter::FilterLayer;

use super::Options;
use super::bearer::{Bearer, Unusable};
use crate::FeedError;
use crate::contact::{Failure, FailureKind};

/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// The meaning of 404 for a list or a watch: the API lacks the kind. Neither request names a single object.
const LACKS: &str =
    "; the cluster has no CustomResourceDefinition `virtualmachineinstances.kubevirt.io`: install KubeVirt";

/// Opens a client for the cluster the agent runs in, or for the cluster of `kubeconfig`.
///
/// # Errors
/// Neither is available, or the file asks for a credential program.
pub(super) async fn open(options: &Options) -> Result<Client, FeedError> {
    let (config, bearer) = configured(options).await?;
    client(config, bearer)
}

/// Checks the client's configuration without a request: address, certificates and token.
///
/// # Errors
/// A part is missing or unreadable, or no header can carry the token.
pub fn access(options: &Options) -> Result<(), FeedError> {
    let failed = |error: &dyn Error| FeedError::Vm { reason: error.to_string() };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| failed(&error))?;
    runtime.block_on(async {
        let (config, bearer) = configured(options).await?;
        if let Some(bearer) = &bearer {
            bearer.header(Instant::now()).map_err(|error| failed(&error))?;
        }
        client(config, bearer).map(drop)
    })
}

/// Returns the client's configuration, and its token file, which kube would send unchanged.
async fn configured(options: &Options) -> Result<(kube::Config, Option<Bearer>), FeedError> {
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
                "no access to the cluster's API: {error}; run in a pod, where KUBERNETES_SERVICE_HOST and \
                 KUBERNETES_SERVICE_PORT are set, or set kubevirt.kubeconfig"
            ))
        })?,
    };
    if config.auth_info.exec.is_some() {
        let reason =
            "kubevirt.kubeconfig: expected a token or a certificate, found a program to run (`exec`)";
        return Err(failed(reason.into()));
    }
    config.connect_timeout = Some(CONNECT);
    // kube would retry by itself, with pauses of minutes and without reports. `Pauses` retries here instead.
    config.default_retry = false;
    let auth = &mut config.auth_info;
    // Keep any credential that kube prefers to a token file.
    let file = auth
        .token_file
        .take_if(|_| auth.token.is_none() && auth.username.is_none() && auth.auth_provider.is_none());
    let bearer = file.map(|file| {
        Bearer::open(file.clone().into())
            .map_err(|error| failed(format!("no access to the cluster's API: token file {file}: {error}")))
    });
    Ok((config, bearer.transpose()?))
}

fn client(config: kube::Config, bearer: Option<Bearer>) -> Result<Client, FeedError> {
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| FeedError::Vm { reason: format!("no client for the cluster's API: {error}") })?;
    Ok(match bearer {
        Some(bearer) => builder.with_layer(&FilterLayer::new(bearer)).build(),
        None => builder.build(),
    })
}

/// Classifies a failed request.
pub(super) fn failure(error: &kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) => refused(status),
        kube::Error::Service(cause) if cause.is::<Unusable>() => {
            Failure { kind: FailureKind::Forbidden, reason: cause.to_string() }
        }
        kube::Error::SerdeError(_)
        | kube::Error::FromUtf8(_)
        | kube::Error::LinesCodecMaxLineLengthExceeded => {
            Failure { kind: FailureKind::Unreadable, reason: with_causes(error) }
        }
        _ => Failure { kind: FailureKind::Unreachable, reason: with_causes(error) },
    }
}

/// Classifies a status other than success.
pub(super) fn refused(status: &Status) -> Failure {
    let Status { code, reason, message, .. } = status;
    let text = if message.is_empty() { reason } else { message };
    let kind = FailureKind::of_status(*code);
    // A response without a Status object is text, which may begin with the code.
    let text = text.trim();
    let text = text.strip_prefix(&format!("{code} ")).unwrap_or(text);
    let lacks = if kind == FailureKind::NotFound { LACKS } else { "" };
    Failure { kind, reason: format!("{code} {text}{lacks}") }
}

/// The error with its causes, which kube names only in the error's sources.
fn with_causes(error: &kube::Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        let reason = error.to_string();
        // Some errors repeat their source.
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
        cause = error.source();
    }
    text
}
