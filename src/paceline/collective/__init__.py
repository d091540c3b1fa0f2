"""Operations that several processes carry out together: means, broadcasts, gathers."""
