//! What the signer is to sign for a VM.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use serde_json::{Map, Value};

use super::super::wanted::{Wanted, Work};
use super::super::{Permit, count};
use super::{Token, VmIssuer, locked};
use crate::record::identity::Audience;

/// A token to be signed.
pub struct Order {
    vm_issuer: Arc<VmIssuer>,
    wanted: Wanted,
    mac: Option<Mac>,
    slot: Slot,
    is_signed: bool,
    /// Held until the token is signed or lost.
    _permit: Permit,
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Order")
            .field("vm_issuer", &self.vm_issuer)
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}

impl Order {
    pub(super) fn new(
        vm_issuer: Arc<VmIssuer>,
        wanted: Wanted,
        mac: Option<Mac>,
        slot: Slot,
        permit: Permit,
    ) -> Self {
        Self { vm_issuer, wanted, mac, slot, is_signed: false, _permit: permit }
    }

    /// Returns the slot whose request waits.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Returns the VM's owner and name.
    #[must_use]
    pub fn vm(&self) -> (&str, &str) {
        (self.vm_issuer.owner.as_str(), &self.vm_issuer.name)
    }

    /// Returns the MAC of the NIC that asks, if it is known.
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        self.mac
    }

    /// Returns the subject.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.vm_issuer.claims.subject()
    }

    /// Returns the audience; `None` for a document, which is for everybody.
    #[must_use]
    pub fn audience(&self) -> Option<&str> {
        self.wanted.audience().map(Audience::as_str)
    }

    /// Returns the name of what is ordered, for reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.wanted.kind()
    }

    /// Returns the claims of a token, without those of the signer. A document has none.
    #[must_use]
    pub fn claims(&self) -> Map<String, Value> {
        match &self.wanted {
            Wanted::Token { audience, form: Some(form) } => {
                self.vm_issuer.claims.in_form(audience.as_str(), form)
            }
            Wanted::Token { audience, form: None } => {
                self.vm_issuer.claims.for_audience(audience.as_str(), self.mac)
            }
            Wanted::Signature(_)
            | Wanted::Envelope(_)
            | Wanted::Detached { .. }
            | Wanted::Attested { .. } => Map::new(),
        }
    }

    /// Returns what to sign.
    #[must_use]
    pub fn work(&self) -> Work {
        let text = |document: &Bytes| String::from_utf8_lossy(document).into_owned();
        match &self.wanted {
            Wanted::Token { .. } => Work::Jwt(self.claims()),
            Wanted::Signature(document) => Work::Signature(text(document)),
            Wanted::Envelope(document) => Work::Envelope(text(document)),
            Wanted::Detached { document, .. } => Work::Detached(text(document)),
            Wanted::Attested { statement, nonce } => {
                let mut statement = (**statement).clone();
                if let Some(nonce) = nonce {
                    statement.insert("nonce".to_owned(), nonce.as_str().into());
                }
                Work::Attested(statement)
            }
        }
    }

    /// Stores the token. An order that is dropped without it has failed.
    pub fn signed(mut self, token: Token) {
        count(&self.vm_issuer.issuer.0.counters.signed);
        self.is_signed = true;
        self.end(Some(token));
    }

    fn end(&self, token: Option<Token>) {
        if let Some(entry) = locked(&self.vm_issuer.cache).find(&self.wanted, self.mac) {
            entry.waits = false;
            if let Some(token) = token {
                // The signer tells of a removed key before it signs by another one.
                (entry.token, entry.revocations) = (Some(token), self.vm_issuer.issuer.revocations());
            }
        }
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        if !self.is_signed {
            count(&self.vm_issuer.issuer.0.counters.failed);
            self.end(None);
        }
    }
}
