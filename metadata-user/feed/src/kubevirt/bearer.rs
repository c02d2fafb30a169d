//! The bearer token from a file, added to each request to the API server.
//!
//! kube sends the file's content unchanged, and a newline at its end makes the header invalid. This module removes
//! white space at both ends, as client-go does. It reads the file again every minute, because kubelet renews mounted
//! tokens.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use kube::client::Body;
use tower::BoxError;
use tower::filter::Predicate;

/// How long a token is sent before its file is read again.
const FRESH: Duration = Duration::from_secs(60);
/// Longest token in octets. API servers accept 1 MiB of headers in all; service account tokens have about 1 KiB.
const OCTETS: u64 = 64 << 10;

/// A token that no header can carry. The message names the file and repeats nothing of its content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: expected a token of one line, found {found}", path.display())]
pub(super) struct Unusable {
    path: PathBuf,
    found: &'static str,
}

/// Adds the token from a file to requests.
#[derive(Clone, Debug)]
pub(super) struct Bearer(Arc<Mutex<Token>>);

#[derive(Debug)]
struct Token {
    path: PathBuf,
    header: Result<HeaderValue, Unusable>,
    read: Instant,
}

impl Bearer {
    /// Reads the file, which must exist. A token that cannot be sent fails each request.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let header = read(&path)?;
        Ok(Self(Arc::new(Mutex::new(Token { path, header, read: Instant::now() }))))
    }

    /// The `Authorization` header of a request made at `now`.
    pub(super) fn header(&self, now: Instant) -> Result<HeaderValue, Unusable> {
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

fn read(path: &PathBuf) -> io::Result<Result<HeaderValue, Unusable>> {
    let mut octets = Vec::new();
    File::open(path)?.take(OCTETS + 1).read_to_end(&mut octets)?;
    let token = octets.trim_ascii();
    let unusable = |found| Err(Unusable { path: path.clone(), found });
    if token.is_empty() {
        return Ok(unusable("nothing"));
    }
    if u64::try_from(octets.len()).is_ok_and(|found| found > OCTETS) {
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
    use super::{Bearer, FRESH, OCTETS};
    use std::fs;
    use std::time::Instant;

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
        let limit = usize::try_from(OCTETS).expect("it fits");
        for (octets, fits) in [(limit, true), (limit + 1, false)] {
            fs::write(&path, "a".repeat(octets)).expect("written");
            let bearer = Bearer::open(path.clone()).expect("it is there");
            assert_eq!(bearer.header(Instant::now()).is_ok(), fits, "{octets}");
        }
    }
}
