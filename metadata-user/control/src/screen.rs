//! The terminal view of a node, as `xdp-imds top` shows it.
//!
//! ```text
//!  agent ── Top, VmPage (crate::top) ──► Screen ── draw ──► Buffer ──► terminal | plain text
//!                                    keys ──────────►│
//! ```
//!
//! [`Screen`] is the state: the last documents, what is shown, and what to ask next. [`draw::draw`] makes cells of it,
//! and tests compare these. Only [`terminal`] knows a real terminal, and only [`fetch()`] the agent.

pub mod draw;
pub mod terminal;

#[cfg(test)]
mod tests;

pub use draw::{plain, printed};
pub use terminal::TerminalStyle;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::path::Path;

use crate::status::ClientError;
use crate::top::{self, Top, TopQuery, VmPage, VmRow, WORDS_MOST};

/// Number of VMs that the view asks for.
pub const LISTED: usize = 256;

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ScreenContent {
    /// The node and its VMs.
    #[default]
    Node,
    /// The page of the VMs with this name, MAC or port.
    Vm(String),
    /// The keys.
    Help,
}

/// What to ask the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewQuery {
    /// The node and its VMs.
    pub node: TopQuery,
    /// Also the pages of a VM.
    pub vm: Option<TopQuery>,
}

/// What the agent has answered.
#[derive(Clone, Debug, Default)]
pub struct Documents {
    /// The node and its VMs.
    pub top: Top,
    /// The pages of a VM, with the name that was asked for.
    pub vm: Option<(String, Vec<VmPage>)>,
}

/// The state of the view.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    /// The last answer; `None` before the first.
    pub documents: Option<Documents>,
    /// Why there is no newer answer.
    pub away: Option<String>,
    /// What is shown.
    pub shown: ScreenContent,
    /// Order and filter.
    pub query: TopQuery,
    /// The selected VM, by its place in the list.
    pub selected: usize,
    /// The filter as it is typed.
    pub typed: Option<String>,
}

impl Screen {
    /// A view with an order and a filter.
    #[must_use]
    pub fn new(query: TopQuery) -> Self {
        Self { query, ..Self::default() }
    }

    /// What to ask next.
    #[must_use]
    pub fn asked(&self) -> ViewQuery {
        let vm = match &self.shown {
            ScreenContent::Vm(name) => Some(TopQuery { guest: Some(name.clone()), ..TopQuery::default() }),
            ScreenContent::Node | ScreenContent::Help => None,
        };
        let node =
            TopQuery { limit: Some(self.query.limit.unwrap_or(LISTED)), guest: None, ..self.query.clone() };
        ViewQuery { node, vm }
    }

    /// Takes an answer, or the reason why there is none. The selection stays on its VM.
    pub fn on_answer(&mut self, answer: Result<Documents, String>) {
        match answer {
            Ok(documents) => {
                let chosen = self.chosen().map(|row| (row.port.clone(), row.mac.clone()));
                let is_chosen = |row: &VmRow| {
                    chosen.as_ref().is_some_and(|(port, mac)| (&row.port, &row.mac) == (port, mac))
                };
                // The first line stays selected, so that the newest VM is in view.
                if self.selected > 0
                    && let Some(at) = documents.top.vms.iter().position(is_chosen)
                {
                    self.selected = at;
                }
                self.selected = self.selected.min(documents.top.vms.len().saturating_sub(1));
                self.documents = Some(documents);
                self.away = None;
            }
            Err(reason) => self.away = Some(reason),
        }
    }

    /// The node's last document.
    #[must_use]
    pub fn top(&self) -> Option<&Top> {
        self.documents.as_ref().map(|documents| &documents.top)
    }

    /// The pages of the VM that is shown, if they have arrived.
    #[must_use]
    pub fn pages(&self, name: &str) -> Option<&[VmPage]> {
        let (asked, pages) = self.documents.as_ref()?.vm.as_ref()?;
        (asked == name).then_some(pages)
    }

    /// The selected VM.
    #[must_use]
    pub fn chosen(&self) -> Option<&VmRow> {
        self.top()?.vms.get(self.selected)
    }

    /// Moves the selection.
    pub(crate) fn select(&mut self, at: usize) {
        let most = self.top().map_or(0, |top| top.vms.len().saturating_sub(1));
        self.selected = at.min(most);
    }

    /// Adds a character to the typed filter.
    pub(crate) fn type_in(&mut self, letter: char) {
        if let Some(typed) = &mut self.typed
            && typed.len() + letter.len_utf8() <= WORDS_MOST
        {
            typed.push(letter);
        }
    }
}

// Keys.

/// Lines that a page key moves.
const PAGE: usize = 10;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// Nothing.
    Nothing,
    /// Draw again.
    Draw,
    /// Ask the agent at once, and draw.
    Ask,
    /// End the view.
    Quit,
    /// End the view, and what it shows if that was started with it.
    Interrupt,
}

impl Screen {
    /// Handles a key.
    pub fn on_key(&mut self, key: KeyEvent) -> KeyAction {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => KeyAction::Interrupt,
                KeyCode::Char('l') => KeyAction::Draw,
                _ => KeyAction::Nothing,
            };
        }
        if self.typed.is_some() {
            return self.on_typed(key.code);
        }
        match (key.code, &self.shown) {
            (KeyCode::Char('q'), ScreenContent::Node) => return KeyAction::Quit,
            (
                KeyCode::Char('q') | KeyCode::Esc | KeyCode::Backspace | KeyCode::Left,
                ScreenContent::Vm(_) | ScreenContent::Help,
            )
            | (KeyCode::Char('?' | 'h'), ScreenContent::Help) => {
                self.shown = ScreenContent::Node;
            }
            (KeyCode::Char('?' | 'h'), _) => self.shown = ScreenContent::Help,
            (_, ScreenContent::Vm(_) | ScreenContent::Help) => return KeyAction::Nothing,
            (KeyCode::Char('/'), ScreenContent::Node) => self.typed = Some(self.query.filter.clone()),
            (KeyCode::Char('s'), ScreenContent::Node) => {
                self.query.sort = self.query.sort.next();
                self.selected = 0;
                return KeyAction::Ask;
            }
            (KeyCode::Esc, ScreenContent::Node) if !self.query.filter.is_empty() => {
                self.query.filter.clear();
                return KeyAction::Ask;
            }
            (KeyCode::Enter | KeyCode::Right, ScreenContent::Node) => {
                let Some(row) = self.chosen() else { return KeyAction::Nothing };
                self.shown = ScreenContent::Vm(row.mac.clone());
                return KeyAction::Ask;
            }
            (code, ScreenContent::Node) => return self.on_move(code),
        }
        KeyAction::Draw
    }

    fn on_move(&mut self, code: KeyCode) -> KeyAction {
        let at = match code {
            KeyCode::Down | KeyCode::Char('j') => self.selected + 1,
            KeyCode::Up | KeyCode::Char('k') => self.selected.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.selected + PAGE,
            KeyCode::PageUp => self.selected.saturating_sub(PAGE),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => usize::MAX,
            _ => return KeyAction::Nothing,
        };
        self.select(at);
        KeyAction::Draw
    }

    /// A key while the filter is typed.
    fn on_typed(&mut self, code: KeyCode) -> KeyAction {
        match code {
            KeyCode::Enter => {
                self.query.filter = self.typed.take().unwrap_or_default();
                self.selected = 0;
                return KeyAction::Ask;
            }
            KeyCode::Esc => self.typed = None,
            KeyCode::Backspace => _ = self.typed.as_mut().and_then(String::pop),
            KeyCode::Char(letter) => self.type_in(letter),
            _ => return KeyAction::Nothing,
        }
        KeyAction::Draw
    }
}

/// Asks the agent of a run directory.
///
/// # Errors
/// [`ClientError`] without an answer.
pub fn fetch(run: &Path, asked: &ViewQuery) -> Result<Documents, ClientError> {
    let top = top::fetch(run, &asked.node)?;
    let vm = match &asked.vm {
        Some(query) => Some((query.guest.clone().unwrap_or_default(), top::fetch(run, query)?)),
        None => None,
    };
    Ok(Documents { top, vm })
}
