//! One connection's exchange.
