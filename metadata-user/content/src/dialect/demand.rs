//! Renders dialects of a record when its guest first asks for them.
//!
//! A record is served in twenty dialects, and a guest reads one or two. The others would take thirty of the forty
//! kilobytes of a VM, and most of the time that a new record takes. The mounts that the dialects describe tell which
//! dialects may answer a path.

use std::sync::{Arc, LazyLock};

use super::{DIALECTS, Row, render_dialects};
use crate::record::{Dialects, Record};
use crate::store::path::Canonical;
use crate::store::{Host, Interner, Responses, UnrenderedDialects, VmState};

/// Returns the dialects that a record serves, each by the first name of its row.
pub(super) fn served(record: &Record) -> Dialects {
    DIALECTS.iter().filter(|row| row.is_served(record)).map(Row::name).collect()
}

/// Returns the dialects that a guest will ask for first, as far as the record tells: the datasource in its SMBIOS, and
/// what may answer the same paths.
#[must_use]
pub fn expected(record: &Record) -> Dialects {
    let stamped = record.serve.smbios.dialect();
    let is_stamped = |row: &&Row| stamped.is_some_and(|name| row.is_for(name));
    let mounts = DIALECTS.iter().filter(is_stamped).flat_map(|row| row.dialect.mounts);
    mounts.fold(Dialects::NONE, |all, mount| all.or(claims(mount.host, mount.path)))
}

/// Renders the dialects of `asked`. [`render_more`] renders the others when a request needs them.
#[must_use]
pub fn render_asked(
    record: &Arc<Record>,
    interner: &mut Interner,
    vm: VmState,
    asked: Dialects,
) -> Responses {
    let served = served(record);
    let rendered = served.and(asked);
    render_dialects(record, interner, vm, rendered).without(UnrenderedDialects {
        record: Arc::clone(record),
        rendered,
        missing: served.without(rendered),
    })
}

/// Renders the responses again with the dialects of `more`. `None` if all are rendered.
#[must_use]
pub fn render_more(responses: &Responses, interner: &mut Interner, more: Dialects) -> Option<Responses> {
    let known = responses.unrendered()?;
    let vm = responses.vm().clone();
    Some(render_asked(&known.record, interner, vm, known.rendered.or(more)))
}

/// Returns the dialects that are not rendered and may answer a request for this path, which is normalised.
#[must_use]
pub fn missing(responses: &Responses, host: Host, path: &str) -> Dialects {
    let Some(unrendered) = responses.unrendered() else { return Dialects::NONE };
    claims_among(unrendered.missing, host, &Canonical::of(host, path))
}

/// Returns the dialects that may have routes at this path of a route or above it.
pub(super) fn claims(host: Host, path: &str) -> Dialects {
    claims_among(Dialects::ALL, host, &Canonical::at(path))
}

fn claims_among(dialects: Dialects, host: Host, path: &Canonical<'_>) -> Dialects {
    let likely = dialects.and(likely(host, path.first_segment()));
    if likely.is_empty() {
        return Dialects::NONE;
    }
    let answers = |row: &&Row| {
        likely.contains(row.name())
            && row.mounts_at(host).any(|mount| path.is_in(mount.path.trim_end_matches('/')))
    };
    DIALECTS.iter().filter(answers).map(Row::name).collect()
}

/// Returns whether a dialect that is not rendered has routes at the host.
#[must_use]
pub fn is_missing_at(responses: &Responses, host: Host) -> bool {
    let missing = responses.unrendered().map_or(Dialects::NONE, |unrendered| unrendered.missing);
    DIALECTS.iter().any(|row| missing.contains(row.name()) && row.mounts_at(host).next().is_some())
}

/// The dialects of one host: with routes anywhere below `/`, and by the first segment of their mounts, sorted.
#[derive(Default)]
struct Segments {
    anywhere: Dialects,
    below: Vec<(&'static str, Dialects)>,
}

/// A look-up takes a few comparisons instead of one for each mount.
static SEGMENTS: LazyLock<[Segments; Host::ALL.len()]> = LazyLock::new(|| Host::ALL.map(segments));

fn segments(host: Host) -> Segments {
    let mut all = Segments::default();
    for row in DIALECTS {
        let own: Dialects = [row.name()].into_iter().collect();
        for mount in row.mounts_at(host) {
            match mount.path.split('/').nth(1).unwrap_or("") {
                "" => all.anywhere = all.anywhere.or(own),
                segment => match all.below.iter_mut().find(|(known, _)| *known == segment) {
                    Some((_, dialects)) => *dialects = dialects.or(own),
                    None => all.below.push((segment, own)),
                },
            }
        }
    }
    all.below.sort_by_key(|(segment, _)| *segment);
    all
}

fn likely(host: Host, segment: &str) -> Dialects {
    let Segments { anywhere, below } = &SEGMENTS[host.index()];
    let found = below.binary_search_by_key(&segment, |(known, _)| known);
    found.map_or(*anywhere, |at| anywhere.or(below[at].1))
}
