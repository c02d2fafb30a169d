//! The answers that a guest must get from its own record.

use crate::record::Identity;
use anyhow::{Context as _, Result, bail, ensure};

/// The domain of every lab guest's hostname.
pub const DOMAIN: &str = "lab.internal";
/// Paths that every guest requests.
pub const PATHS: [&str; 2] = ["/v1/meta-data", "/v1/user-data"];

/// Checks an answer to one of [`PATHS`] against the guest's record.
///
/// # Errors
/// Fails if the status is not 200 or the body differs from the record. The error says what was expected.
pub fn check(guest: &Identity, path: &str, status: u16, body: &[u8]) -> Result<()> {
    let text = std::str::from_utf8(body).with_context(|| format!("{path}: the body is not UTF-8"))?;
    let who = format!("{} asked for {path}", guest.hostname);
    ensure!(status == 200, "{who}: expected status 200, got {status}: {text}");
    match path {
        "/v1/meta-data" => {
            let document: serde_json::Value = serde_yaml::from_str(text).with_context(|| who.clone())?;
            ensure_same(&who, "instance-id", &guest.instance_id, document["instance-id"].as_str())?;
            ensure_same(&who, "local-hostname", &name(guest), document["local-hostname"].as_str())?;
            ensure_same(&who, "public-keys", &guest.ssh_key, document["public-keys"][0].as_str())
        }
        "/v1/user-data" => ensure_same(&who, "user-data", &guest.user_data, Some(text)),
        other => bail!("no expected answer is known for {other}"),
    }
}

/// The guest's fully qualified name.
#[must_use]
pub fn name(guest: &Identity) -> String {
    format!("{}.{DOMAIN}", guest.hostname)
}

fn ensure_same(who: &str, what: &str, expected: &str, found: Option<&str>) -> Result<()> {
    if found == Some(expected) {
        return Ok(());
    }
    let found = found.unwrap_or("nothing");
    // User-data may be long, so show only where it differs.
    let common = expected.bytes().zip(found.bytes()).take_while(|(a, b)| a == b).count();
    let from = |text: &str| text.get(common..).unwrap_or_default().chars().take(60).collect::<String>();
    bail!(
        "{who}: {what} has {} bytes of {}, and from byte {common} on it is `{}` instead of `{}`",
        found.len(),
        expected.len(),
        from(found),
        from(expected)
    )
}

#[cfg(test)]
mod tests {
    use super::{PATHS, check};
    use crate::record::Identity;

    #[test]
    fn another_guests_answer_is_refused() {
        let (own, other) = (Identity::of(1), Identity::of(2));
        let body = |guest: &Identity| guest.user_data.clone().into_bytes();
        check(&own, PATHS[1], 200, &body(&own)).expect("its own");
        assert!(check(&own, PATHS[1], 200, &body(&other)).is_err());
        assert!(check(&own, PATHS[1], 404, &body(&own)).is_err());
        assert!(check(&own, PATHS[0], 200, b"instance-id: other").is_err());
    }
}
