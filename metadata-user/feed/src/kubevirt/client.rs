//! The client of the cluster's API server.

use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use kube::Client;
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use std::error::Error;
use std::fs::File;
use std::io;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Builder;
use tower::BoxError;
use tower::filter::{FilterLayer, Predicate};

use super::KubevirtOptions;
use crate::FeedError;
use crate::contact::{ContactError, FailureKind};

/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// The meaning of 404 for a list or a watch: the API lacks the kind. Neither request names a single object.
const LACKS: &str =
    "; the cluster has no CustomResourceDefinition `virtualmachineinstances.kubevirt.io`: install KubeVirt";

/// Opens a client for the cluster the agent runs in, or for the cluster of `kubeconfig`.
///
/// # Errors
/// Neither is available, or the file asks for a credential program.
pub(super) async fn open(options: &KubevirtOptions) -> Result<Client, FeedError> {
    let (config, bearer) = configured(options).await?;
    client(config, bearer)
}

/// Checks the client's configuration without a request: address, certificates and token.
///
/// # Errors
/// A part is missing or unreadable, or no header can carry the token.
pub fn access(options: &KubevirtOptions) -> Result<(), FeedError> {
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
async fn configured(options: &KubevirtOptions) -> Result<(kube::Config, Option<Bearer>), FeedError> {
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
pub(super) fn failure(error: &kube::Error) -> ContactError {
    match error {
        kube::Error::Api(status) => refused(status),
        kube::Error::Service(cause) if cause.is::<InvalidToken>() => {
            ContactError { kind: FailureKind::Forbidden, reason: cause.to_string() }
        }
        kube::Error::SerdeError(_)
        | kube::Error::FromUtf8(_)
        | kube::Error::LinesCodecMaxLineLengthExceeded => {
            ContactError { kind: FailureKind::Unreadable, reason: with_causes(error) }
        }
        _ => ContactError { kind: FailureKind::Unreachable, reason: with_causes(error) },
    }
}

/// Classifies a status other than success.
pub(super) fn refused(status: &Status) -> ContactError {
    let Status { code, reason, message, .. } = status;
    let text = if message.is_empty() { reason } else { message };
    let kind = FailureKind::of_status(*code);
    // A response without a Status object is text, which may begin with the code.
    let text = text.trim();
    let text = text.strip_prefix(&format!("{code} ")).unwrap_or(text);
    let lacks = if kind == FailureKind::NotFound { LACKS } else { "" };
    ContactError { kind, reason: format!("{code} {text}{lacks}") }
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

// The bearer token from a file, added to each request to the API server.
//
// kube sends the file's content unchanged, and a newline at its end makes the header invalid. This module removes
// white space at both ends, as client-go does. It reads the file again every minute, because kubelet renews mounted
// tokens.

/// How long a token is sent before its file is read again.
const FRESH: Duration = Duration::from_secs(60);
/// Longest token in bytes. API servers accept 1 MiB of headers in all; service account tokens have about 1 KiB.
const BYTES: u64 = 64 << 10;

/// A token that no header can carry. The message names the file and repeats nothing of its content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: expected a token of one line, found {found}", path.display())]
pub(super) struct InvalidToken {
    path: PathBuf,
    found: &'static str,
}

/// Adds the token from a file to requests.
#[derive(Clone, Debug)]
pub(super) struct Bearer(Arc<Mutex<Token>>);

#[derive(Debug)]
struct Token {
    path: PathBuf,
    header: Result<HeaderValue, InvalidToken>,
    read: Instant,
}

impl Bearer {
    /// Reads the file, which must exist. A token that cannot be sent fails each request.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let header = read(&path)?;
        Ok(Self(Arc::new(Mutex::new(Token { path, header, read: Instant::now() }))))
    }

    /// The `Authorization` header of a request made at `now`.
    pub(super) fn header(&self, now: Instant) -> Result<HeaderValue, InvalidToken> {
        let mut token = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(token.read) >= FRESH {
            // If the file is gone, the last token stays in use, as with client-go.
            if let Ok(header) = read(&token.path) {
                token.header = header;
            }
            token.read = now;
        }
        token.header.clone()
    }
}

impl Predicate<Request<Body>> for Bearer {
    type Request = Request<Body>;

    fn check(&mut self, mut request: Request<Body>) -> Result<Request<Body>, BoxError> {
        request.headers_mut().insert(AUTHORIZATION, self.header(Instant::now())?);
        Ok(request)
    }
}

fn read(path: &PathBuf) -> io::Result<Result<HeaderValue, InvalidToken>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES + 1).read_to_end(&mut bytes)?;
    let token = bytes.trim_ascii();
    let unusable = |found| Err(InvalidToken { path: path.clone(), found });
    if token.is_empty() {
        return Ok(unusable("nothing"));
    }
    if u64::try_from(bytes.len()).is_ok_and(|found| found > BYTES) {
        return Ok(unusable("more than 64 KiB"));
    }
    Ok(match HeaderValue::from_bytes(&[b"Bearer ", token].concat()) {
        Ok(mut header) => {
            header.set_sensitive(true);
            Ok(header)
        }
        Err(_) => unusable("a control character"),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use super::{BYTES, Bearer, FRESH};

    #[test]
    fn a_renewed_token_is_sent_within_a_minute_and_a_lost_one_stays() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token");
        fs::write(&path, "one\n").expect("written");
        let bearer = Bearer::open(path.clone()).expect("it is there");
        let begun = Instant::now();
        let sent = |minutes: u32| bearer.header(begun + FRESH * minutes).expect("a header");
        fs::write(&path, "two\n").expect("written");
        assert_eq!(sent(0), "Bearer one");
        assert_eq!(sent(1), "Bearer two");
        assert!(sent(1).is_sensitive(), "no log shows it");
        fs::remove_file(&path).expect("removed");
        assert_eq!(sent(2), "Bearer two");
        fs::write(&path, "\n").expect("written");
        bearer.header(begun + FRESH * 3).expect_err("nothing to send");
    }

    #[test]
    fn a_token_beyond_the_limit_is_refused_and_a_missing_file_is_an_error() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token");
        Bearer::open(path.clone()).expect_err("no file");
        let limit = usize::try_from(BYTES).expect("it fits");
        for (bytes, fits) in [(limit, true), (limit + 1, false)] {
            fs::write(&path, "a".repeat(bytes)).expect("written");
            let bearer = Bearer::open(path.clone()).expect("it is there");
            assert_eq!(bearer.header(Instant::now()).is_ok(), fits, "{bytes}");
        }
    }
}
