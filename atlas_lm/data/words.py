"""Words for names that mean nothing: an adjective and a noun, as in quiet-lantern."""

ADJECTIVES = tuple(
    """
    amber ancient angry autumn bitter blank blue bold brave brief bright bronze brown busy calm careful
    cheap cheerful chilly clean clear clever cloudy cold common cool coral cosy crimson crisp curious curly
    damp daring dark deep distant dizzy dry dull dusty eager early elder empty endless even faint fair
    famous fancy fast fierce final fine firm flat floral fond formal fresh frosty gentle giant glad golden
    grand grave green grey handy happy hardy hasty hidden hollow honest huge humble hungry icy idle indigo
    inner jolly keen kind large late lazy lean light little lively lonely long loud lucky mellow merry
    mild misty modest narrow neat noble nimble odd olive open orange pale patient plain pleasant polite
    proud pure purple quick quiet rapid rare red rich ripe rough round royal rusty sad salty sandy scarlet
    secret shallow sharp shiny short shy silent silver simple sleepy slim slow small smooth soft solid
    sour spare spicy steady steep still stormy strong subtle sunny sweet swift tall tame tender thin tidy
    tiny tired twin upper vast velvet vivid warm weary wet wide wild windy winter wise witty wooden young
    """.split()
)
NOUNS = tuple(
    """
    acorn alley anchor apple apron arch arrow autumn badge bakery balloon banjo barley barrel basin basket
    beach beacon bean bell bench berry birch blanket boat bonnet bottle boulder bramble branch bread brick
    bridge broom brook bucket bugle butter button cabin cable camel candle canoe canyon carpet castle
    cedar cellar chain chair chalk cherry chimney cider circle cliff cloak clock cloud clover coast cobble
    coffee collar comet compass copper cottage cradle crater creek cricket crown curtain daisy dancer
    desert dolphin donkey door dragon drum eagle easel elbow elm ember engine falcon farmer feather fern
    ferry fiddle field finch flag flame flute forest fork fountain fox garden garnet gate ginger glacier
    glove goblet goose granite grape gravel grove guitar hammer harbor harp hatch hawk hazel hedge helmet
    heron hill hinge honey horn island ivory jacket jasmine jewel jungle kettle kitten ladder lagoon lake
    lantern lark laurel leaf ledge lemon letter lily linen lion lizard locket lotus magnet maple marble
    market meadow melon mill mirror mitten monkey moon moss mountain mustard napkin needle nest nickel oak
    oasis ocean olive onion orchard otter owl oyster paddle palace panda paper parrot pasture pebble pencil
    pepper piano pigeon pillow pine pirate planet plum pocket pond poplar poppy prairie quarry quilt rabbit
    raven reef ribbon river robin rocket rope saddle sail sailor salmon sapphire scarf shadow shell shovel
    signal slipper sparrow spider spoon spruce squirrel stable staircase star statue stone storm stove
    stream street summit swan table tavern teapot temple thimble thistle thread thunder ticket tiger timber
    torch tower trumpet tulip tunnel turnip turtle valley vase velvet village vine violin wagon walnut
    waterfall wave well whale wheat wheel whistle willow window wolf wren
    """.split()
)
